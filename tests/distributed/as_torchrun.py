"""Ranks as torchrun starts them, from the server of :mod:`tests.distributed.ranks`: no agent, no imports."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

from tests.distributed.ranks import as_started_now, start_method


def run(ranks: int, module: str, *arguments: str, output: Path, timeout_s: float = 240) -> int:
    """``-m module arguments`` in each of so many processes, with torchrun's variables.

    Args:
        output: what they print is appended to this file.

    Returns:
        0 when all have ended so, 1 as soon as one has not, which ends the others as torchrun does.
    """
    context = multiprocessing.get_context(start_method("gloo"))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_rank, args=(environment, output, module, arguments)))
        processes[-1].start()
    return _wait(processes, time.monotonic() + timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(environment: dict[str, str], output: Path, module: str, arguments: tuple[str, ...]) -> None:
    as_started_now(environment)
    with output.open("a") as printed:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(printed.fileno(), stream.fileno())
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait(processes: list[multiprocessing.Process], deadline: float) -> int:
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.05)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return int(any(process.exitcode for process in processes))
