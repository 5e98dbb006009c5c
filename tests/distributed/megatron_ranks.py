"""Starts gloo processes with megatron-core on the CPU, in any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import ranks
import torch.distributed as dist

from launch import cpu


@contextmanager
def _megatron(tp: int | None = None, pp: int = 1, vp: int | None = None, cp: int = 1) -> Iterator[None]:
    """Megatron's parallel state in a process of its own; default: all ranks are tensor parallel.

    Args:
        tp: tensor-parallel size.
        pp: pipeline stages.
        vp: model chunks of each; None: one, and the schedule that does not interleave.
        cp: context-parallel size.
    """
    cpu.enable("cpu")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random

    if not hasattr(random, "FP8GlobalStateManager"):
        # Transformer Engine's, which megatron-core's output-discarding recomputation asks without a check.
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()
    _initialize(tp, pp, vp, cp)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def _initialize(tp: int | None, pp: int, vp: int | None, cp: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp or dist.get_world_size() // (pp * cp),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        create_gloo_process_groups=False,
    )


@contextmanager
def layout(tp: int | None = None, pp: int = 1, vp: int | None = None, cp: int = 1) -> Iterator[None]:
    """Inside a worker: other degrees than it was started with, which come back after."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _initialize(tp, pp, vp, cp)
    yield
    parallel_state.destroy_model_parallel()
    _initialize(None, 1, None, 1)


def run(
    world: int, function: Callable, *args: Any, tp: int | None = None, pp: int = 1, vp: int | None = None, cp: int = 1
) -> list[Any]:
    """Runs ``function(*args)`` in ``world`` processes; returns what each returned.

    Args:
        function: a function of a test module; what it returns must be loadable by ``torch.load``.
        tp: tensor-parallel size; default: ``world / (pp * cp)``.
        pp, vp: pipeline stages, and model chunks of each.
        cp: context-parallel size.
    """
    return ranks.run(world, function, *args, inside=partial(_megatron, tp, pp, vp, cp))


class Workers(ranks.Workers):
    """Functions of a test module that share one start of the processes with Megatron's parallel state."""

    inside = staticmethod(_megatron)
