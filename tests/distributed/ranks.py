"""Starts processes of one process group and runs functions of a test module in them.

On the CPU they are forked from a server that has imported what they import, which takes a process longer than most
tests do. On GPUs each starts anew: CUDA does not outlive a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _process(
    rank: int, environment: dict[str, str], world: int, folder: str, inside: Callable, backend: str, function
) -> None:
    as_started_now(environment)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        args = torch.load(f"{folder}/args", weights_only=False)
        with inside():
            torch.save(function(*args), f"{folder}/result{rank}")
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def run(
    world: int,
    function: Callable,
    *args: Any,
    inside: Callable[[], AbstractContextManager] = nullcontext,
    backend: str = "gloo",
) -> list[Any]:
    """Runs ``function(*args)`` in ``world`` processes; returns what each returned.

    Args:
        function: a function of a test module; what it returns must be loadable by ``torch.load``.
        inside: makes the context that it runs in.
        backend: ``"gloo"``, or ``"nccl"``, where each rank has a GPU of its own.
    """
    with TemporaryDirectory() as folder:
        try:
            # Not as arguments: the server passes on no more than 256 tensors.
            torch.save(args, f"{folder}/args")
            settings = (dict(os.environ), world, folder, inside, backend, function)
            mp.start_processes(_process, settings, nprocs=world, start_method=start_method(backend))
        except Exception as failure:
            told = "\n".join(path.read_text() for path in sorted(Path(folder).glob("error*")))
            raise AssertionError(told or str(failure)) from None
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world)]


def start_method(backend: str) -> str:
    if backend != "gloo":
        return "spawn"
    multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    return "forkserver"


def as_started_now(environment: dict[str, str]) -> None:
    """In a process from the server, whose environment is that of the first process that it started."""
    os.environ.clear()
    os.environ.update(environment)


def has_its_error() -> None:
    """In a rank that others have left waiting: they may go on."""
    dist.distributed_c10d._get_default_store().set(f"has its error {dist.get_rank()}", "")


def wait_for_error_of(*ranks: int) -> None:
    """In a rank that stays away: it lives, without a sign, until these have noticed.

    A rank that ended earlier would close its connections, which the others see at once, and not by the timeout.
    """
    names = [f"has its error {rank}" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(names, timedelta(seconds=60))


class Workers:
    """Functions of a test module that share one start of the processes, which costs more than they do.

    >>> workers = Workers()
    >>> @workers
    ... def _losses(): ...
    >>> workers.results(2)["_losses"]  # what each rank returned
    """

    inside: Callable[[], AbstractContextManager] = nullcontext

    def __init__(self) -> None:
        self.functions: list[Callable] = []

    def __call__(self, function: Callable) -> Callable:
        self.functions.append(function)
        return function

    def results(self, world: int) -> Results:
        names = [function.__name__ for function in self.functions]
        return Results(run(world, _each, names, self.functions, inside=self.inside))


def _each(names: list[str], functions: list[Callable]) -> dict[str, tuple[bool, Any]]:
    found = {}
    for name, function in zip(names, functions, strict=True):
        try:
            found[name] = (True, function())
        except (Exception, pytest.fail.Exception):
            found[name] = (False, traceback.format_exc())
        gc.collect()  # what a test leaves behind must not own weights in the next
    return found


class Results:
    """Raises where a worker raised."""

    def __init__(self, ranks: list[dict[str, tuple[bool, Any]]]):
        self._ranks = ranks

    def __getitem__(self, name: str) -> list[Any]:
        failures = [told for succeeded, told in (rank[name] for rank in self._ranks) if not succeeded]
        if failures:
            raise AssertionError("\n".join(failures))
        return [rank[name][1] for rank in self._ranks]
