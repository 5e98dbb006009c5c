"""What the stages of a pipeline tell each other when a run is set up and when it is saved."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Value = TypeVar("Value")


def over_stages(named: dict[str, Value], group: dist.ProcessGroup) -> dict[str, Value]:
    """The entries of all ranks of ``group``, on each of them; every rank calls it.

    Megatron writes what is not a ShardedTensor from the first rank alone, so that the stages after the first, or
    other ranks' experts, would be missing from a checkpoint.

    Args:
        named: by the weight's name in the whole model, small values on the CPU.
        group: the pipeline's stages, and for experts all ranks that have shards of any.
    """
    if group.size() == 1:
        return named
    everywhere: list[dict[str, Value] | None] = [None] * group.size()
    dist.all_gather_object(everywhere, named, group=group)
    return {name: value for stage in everywhere for name, value in stage.items()}


def expect_weights_on_every_stage(owned: int, why_not: str, device: torch.device) -> None:
    """Every stage must have a weight that FORGE steps; every rank calls it.

    Args:
        owned: how many this stage has.
        why_not: what is said of a stage without.
        device: of the model.

    Raises:
        ValueError: on every rank alike, so that none waits for one that has raised.
    """
    least = torch.tensor(owned, device=device)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    if not owned or not int(least):
        raise ValueError(
            why_not if not owned else "a pipeline stage has no weight that FORGE can step; give it a layer"
        )


def expect_experts_on_every_stage(owned: int, device: torch.device) -> None:
    """Either no stage has experts that FORGE steps under expert parallelism, or every one; every rank calls it.

    Args:
        owned: how many weights of experts this stage has.
        device: of the model.

    Raises:
        ValueError: on every rank alike.
    """
    fewest_and_most = torch.tensor([owned, -owned], device=device)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(fewest_and_most, op=dist.ReduceOp.MIN, group=group)
    fewest, most = fewest_and_most.tolist()
    if fewest == 0 and most != 0:
        raise ValueError(
            "moe_layer_freq: a pipeline stage has experts that FORGE steps and another has none, which is not built "
            "under expert parallelism; give every stage a layer of experts"
        )
