"""A run's state as Megatron's sharded state dict: weights, optimizer, schedule, position, RNG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, is_graph_safe_cuda_rng_tracker

from launch import checkpoint
from launch.config import Recipe, RecipeError
from launch.optim import expect_schedule, override_ends

# What Megatron's own optimizer would begin from, where a 16-bit weight has no master: the weight itself once more.
_COPIES = "optimizer.state.fp32_param."


@dataclass(frozen=True)
class Progress:
    """Where a run is. ``horizon``: training samples over which the data's order was drawn."""

    step: int
    horizon: int
    ranks: int


def _rng_state() -> dict:
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: convert_cuda_rng_state(state) for name, state in tracker.items()},
    }


def _set_rng_state(state: dict) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    graphable = is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states({name: convert_cuda_rng_state(each, graphable) for name, each in state["tracker"].items()})
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"])


# What decides the next sample, what weights of the same shapes compute, or what an optimizer reads from its checkpoint
# whatever the recipe says.
_FIXED = (
    "run.seed",
    "batch.total",
    "data.sequence_length",
    "data.tokenizer",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.kv_channels",
    "model.position_embedding",
    "model.rotary_base",
    "model.normalization",
    "model.norm_epsilon",
    "model.activation",
    "model.expert_topk",
    "model.expert_grouped",
    "parallel.expert",
    "optimizer.rule",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
)


def _expect_fixed(recipe: Recipe, saved: dict) -> None:
    for key, value in saved.items():
        if key == "parallel.expert" and recipe.optimizer.use_forge:
            continue  # Megatron's own optimizers do not read what another number of them has written
        if recipe.get(key) != value:
            raise RecipeError(key, f"{recipe.get(key)} here, {value} in the checkpoint: it cannot change in a run")


# Megatron's: any number of ranks reads the distributed optimizer's states, and a state has the same key whether dense
# weights and experts have one optimizer, on one expert-parallel rank, or two.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def sharded_state(recipe, chunks, optimizer, scheduler, progress: Progress, loading: bool = False) -> dict:
    """What a checkpoint holds. With ``loading`` the optimizer's states are created to be filled."""
    model = {f"chunk{i}": chunk.module.sharded_state_dict() for i, chunk in enumerate(chunks)}
    rng = ShardedObject("rng", _rng_state(), (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)
    return {
        "model": model,
        "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=_METADATA),
        "scheduler": scheduler.state_dict(),
        "progress": asdict(progress),
        "fixed": {key: recipe.get(key) for key in _FIXED},
        "rng": rng,
    }


def _param_groups(saved: dict) -> Iterator[dict]:
    """All of a checkpoint's optimizer or optimizers, at whatever depth Megatron keeps them."""
    for key, value in saved.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _param_groups(value)


def restore(recipe: Recipe, folder: Path, chunks, optimizer, scheduler, on_note) -> Progress:
    """Load a checkpoint into a run that was just built.

    With another number of ranks the weights and states are resharded, and the random state, which
    only dropout reads, begins anew: ``on_note`` is told.

    Raises:
        RecipeError: a key that a run cannot change, or a schedule that is not the checkpoint's.
    """
    common = checkpoint.common(folder)
    _expect_fixed(recipe, common["fixed"])
    progress = Progress(**common["progress"])
    state = sharded_state(recipe, chunks, optimizer, scheduler, progress, loading=True)
    same_ranks = progress.ranks == dist.get_world_size()
    if not same_ranks:
        del state["rng"]
    loaded = checkpoint.load(folder, state, optional=(_COPIES,) if same_ranks else (_COPIES, "rng"))
    expect_schedule(scheduler, loaded["scheduler"])
    # megatron-core 0.19 finds a saved group by its ends, among others; 0.16 takes them over from it.
    override_ends(scheduler, _param_groups(loaded["optimizer"]))
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded["model"][f"chunk{i}"])
    optimizer.load_state_dict(loaded["optimizer"])
    override_ends(scheduler, optimizer.param_groups)
    scheduler.load_state_dict(loaded["scheduler"])
    if same_ranks:
        _set_rng_state(loaded["rng"])
    else:
        on_note(
            f"{folder.name} was written by {progress.ranks} ranks and is read by "
            f"{dist.get_world_size()}: the random state begins anew"
        )
    return progress
