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
def _megatron(**degrees: int | None) -> Iterator[None]:
    """Megatron's parallel state in a process of its own; default: all ranks are tensor parallel."""
    cpu.enable("cpu")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random

    if not hasattr(random, "FP8GlobalStateManager"):
        # Transformer Engine's, which megatron-core's output-discarding recomputation asks without a check.
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()
    _initialize(**degrees)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def _initialize(
    tp: int | None = None,
    pp: int = 1,
    vp: int | None = None,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    instances: int = 1,
) -> None:
    """
    Args:
        tp: tensor-parallel size; None: all ranks that the others leave.
        pp: pipeline stages.
        vp: model chunks of each; None: one, and the schedule that does not interleave.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: tensor-parallel size of experts; None: ``tp``.
        instances: of the distributed optimizer, each with all states.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp or dist.get_world_size() // (pp * cp),
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )


@contextmanager
def layout(**degrees: int | None) -> Iterator[None]:
    """Inside a worker: other degrees than it was started with; after it those of no arguments."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _initialize(**degrees)
    yield
    parallel_state.destroy_model_parallel()
    _initialize()


def mesh_of_cpus() -> None:
    """For Megatron's TorchFullyShardedDataParallel, which asks for a mesh of GPUs whatever there is."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from torch.distributed.device_mesh import DeviceMesh

    of_cpus = SimpleNamespace(from_group=lambda group, _cuda: DeviceMesh.from_group(group, "cpu"))
    torch_fully_sharded_data_parallel.DeviceMesh = of_cpus


def run(world: int, function: Callable, *args: Any, **degrees: int | None) -> list[Any]:
    """Runs ``function(*args)`` in ``world`` processes; returns what each returned.

    Args:
        function: a function of a test module; what it returns must be loadable by ``torch.load``.
        degrees: as :func:`_initialize` takes them.
    """
    return ranks.run(world, function, *args, inside=partial(_megatron, **degrees))


class Workers(ranks.Workers):
    """Functions of a test module that share one start of the processes with Megatron's parallel state."""

    inside = staticmethod(_megatron)
