"""Checkpoints of the runs of megatron_harness, and what FORGE holds of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron_harness import Run


def sharded(session: Run, is_loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,  # megatron.training's
    }
    if len(session.models) == 1:
        model = session.model.sharded_state_dict(metadata=metadata)
    else:
        model = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(session.models)}
    optimizer = session.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "schedule": session.schedule.state_dict()}


def save(session: Run, folder: str) -> None:
    """A dist_checkpointing checkpoint, and the position in the data."""
    from megatron.core import dist_checkpointing

    state = sharded(session, is_loading=False)
    dist_checkpointing.save({**state, "generator": session.generator.get_state()}, folder)


def load_schedule(session: Run, state: dict[str, Any]) -> None:
    session.schedule.num_steps = 0  # Megatron adds the saved steps to those already made
    session.schedule.load_state_dict(state)


def load(session: Run, folder: str) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(session, is_loading=True), folder)
    for index, model in enumerate(session.models):
        model.load_state_dict(state["model"] if len(session.models) == 1 else state["model"][f"model{index}"])
    session.optimizer.load_state_dict(state["optimizer"])
    load_schedule(session, state["schedule"])
    session.generator.set_state(state["generator"])


def owned_state(session: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Name to state of the weights that FORGE steps, experts too."""
    return {
        one.layout.names[p]: {key: value.clone() for key, value in state.items()}
        for one in session.optimizer.chained_optimizers
        if hasattr(one, "forge")
        for p, state in one.forge.state.items()
    }
