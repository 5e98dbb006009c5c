"""Process groups, seeds and determinism: all that must be in force before a model is built."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from launch import cpu
from launch.config import Parallel, Recipe


def set_determinism(deterministic: bool) -> None:
    """Before the first CUDA call: cuBLAS and NCCL read these variables once."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NCCL_ALGO"] = "Ring"
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True)


def seed(value: int, capture: bool = False) -> None:
    """Seed torch and Megatron's trackers, which keep tensor-parallel ranks apart.

    Args:
        capture: the trackers are such that a CUDA graph can draw from them; it draws the same numbers.
    """
    from megatron.core import tensor_parallel

    torch.manual_seed(value)
    how = {"use_cudagraphable_rng": True, "force_reset_rng": True} if capture else {}
    tensor_parallel.model_parallel_cuda_manual_seed(value, **how)


@contextlib.contextmanager
def model_parallel(parallel: Parallel) -> Iterator[None]:
    """megatron-core's groups of these degrees, over the ranks of the process group that there is."""
    from megatron.core import parallel_state

    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def process_groups(recipe: Recipe) -> Iterator[torch.device]:
    """megatron-core's parallel state for the recipe, from torchrun's variables.

    Yields this rank's device.

    Raises:
        RuntimeError: torchrun started another number of ranks than the recipe's degrees make.
    """
    p = recipe.parallel
    set_determinism(recipe.run.deterministic)
    on_cpu = cpu.enable(recipe.run.device)
    device = torch.device("cpu")
    if not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        timeout=timedelta(minutes=recipe.run.timeout_minutes),
        **({} if on_cpu else {"device_id": device}),
    )
    try:
        if dist.get_world_size() != recipe.world_size:
            raise RuntimeError(
                f"{dist.get_world_size()} ranks were started, and parallel.tensor={p.tensor} x pipeline={p.pipeline} "
                f"x context={p.context} x data={p.data} is {recipe.world_size}"
            )
        with model_parallel(p):
            seed(recipe.run.seed, recipe.run.capture and not on_cpu)
            yield device
    finally:
        dist.destroy_process_group()
