"""Checkpoints of all experts on one rank read by ranks that have some each, and the other way round.

On one expert-parallel rank Megatron steps experts and dense weights by one optimizer, and on several by two. With
``chained_optim_avoid_prefix`` in the metadata, as ``megatron.training`` has it, tensors have the same keys in both
checkpoints. What is left is what an optimizer writes of itself: hyperparameters, step count, and FORGE's states that
are not sharded; it is in one place or in two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

if TYPE_CHECKING:
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer

# By the names of weights, which are those of every layout.
_BY_NAME = ("forge_groups", "forge_steps", "forge_states")
_IDENTIFIERS = [key for key in param_group_identifier_keys if key != "is_expert_parallel"]


def of_each(optimizers: Sequence[ForgeMegatronOptimizer], saved: Any) -> Any:
    """A loaded state dict for these optimizers, whether one or two have written it.

    Args:
        optimizers: of the chain.
        saved: what ``dist_checkpointing.load`` gave for the chain's template: one state dict, or several by number;
            where the writer had another number than the reader, both in one dictionary.

    Raises:
        ValueError: dense weights and experts have been stepped different times; or a group of parameters of which
            the checkpoint says nothing.
    """
    if not isinstance(saved, Mapping):
        return saved
    several = {key: value for key, value in saved.items() if isinstance(key, int)}
    one = {key: value for key, value in saved.items() if not isinstance(key, int)}
    if not several or not one:
        return saved
    if len(optimizers) == 1:
        sources = [several[key] for key in sorted(several)]
        return _completed(optimizers[0], one, sources)
    return {number: _completed(optimizers[number], part, [one]) for number, part in several.items()}


def _completed(optimizer: ForgeMegatronOptimizer, part: dict[str, Any], sources: list[dict[str, Any]]) -> dict:
    """``part``, of which tensors were loaded, with what ``sources`` say of the same parameters."""
    if "optimizer" in part:
        scaler = {key: sources[0][key] for key in ("grad_scaler",) if key in sources[0]}
        inner = _completed(optimizer, part["optimizer"], [source["optimizer"] for source in sources])
        return {**part, **scaler, "optimizer": inner}
    counts = {int(source["state"]["common_step"]) for source in sources if "common_step" in source.get("state", {})}
    if len(counts) > 1:
        raise ValueError(
            f"the checkpoint's dense weights and experts were stepped {' and '.join(map(str, sorted(counts)))} times; "
            "load it with more than one expert-parallel rank, as it was written"
        )
    step = {"common_step": counts.pop()} if counts else {}
    named = {key: {k: v for source in sources for k, v in source.get(key, {}).items()} for key in _BY_NAME}
    groups = [group for source in sources for group in source["param_groups"]]
    return {
        **{key: value for key, value in named.items() if value},
        "state": {**part["state"], **step},
        "param_groups": [
            {**_alike(here, groups), "is_expert_parallel": here["is_expert_parallel"], **loaded}
            for here, loaded in zip(optimizer.layout.groups, part["param_groups"], strict=True)
        ],
    }


def _alike(group: Mapping[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    identity = {key: group.get(key) for key in _IDENTIFIERS}
    for other in saved:
        if all(other.get(key) == value for key, value in identity.items()):
            return other
    raise ValueError(f"the checkpoint has no group of parameters with {identity}")
