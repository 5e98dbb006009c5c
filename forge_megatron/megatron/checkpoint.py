"""Optimizer state in Megatron's own checkpoint format.

A run with FORGE writes what the same run without it would write: one entry a parameter, keyed by the
parameter's name (``optimizer.state.exp_avg.<key>``), param groups in Megatron's order, one step count. So
either kind of run reads the other's checkpoint, on any tensor-parallel size, and no conversion is needed.
8-bit states are written in fp32, from which they are read with the same codes, unless another tensor-parallel
size cuts their blocks of 64 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from torch import Tensor

from forge_megatron.megatron.rule import dense_states, megatrons
from forge_megatron.megatron.stages import over_stages

if TYPE_CHECKING:
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer

# What a param group has besides hyperparameters.
_MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class Layout:
    """The dense parameters in the order of the optimizer of a run without FORGE.

    Attributes:
        groups: ``_get_param_groups``' groups, all parameters in them.
        names: parameter to global name.
        owned: the ids of the parameters that FORGE steps.
    """

    groups: list[dict[str, Any]]
    names: dict[Tensor, str]
    owned: frozenset[int]

    def parameters(self) -> list[Tensor]:
        """The model's parameters; the position is the id in a state dict."""
        return list(chain.from_iterable(group["params"] for group in self.groups))

    def owns(self, parameter: Tensor) -> bool:
        return id(parameter) in self.owned

    def dense_parameters(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name to (parameter, the tensor that Megatron steps for it)."""
        return {self.names[p]: (p, _stepped(p)) for p in self.parameters() if not self.owns(p)}


def _stepped(parameter: Tensor) -> Tensor:
    """What Megatron's optimizer holds for a parameter: the fp32 copy of a bf16 one."""
    main = getattr(parameter, "main_param", None)
    return parameter if main is None else main


def _ids(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Consecutive ids, group by group."""
    ids, start = [], 0
    for group in groups:
        ids.append(list(range(start, start + len(group["params"]))))
        start += len(group["params"])
    return ids


def _positions(groups: Iterable[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """id(tensor) to (its group's index, its state-dict id)."""
    found, position = {}, 0
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            found[id(parameter)] = (index, position)
            position += 1
    return found


def _torch_groups(optimizer: ForgeMegatronOptimizer) -> list[dict[str, Any]]:
    inner = optimizer.dense.optimizer
    return [] if inner is None else inner.param_groups


def _is_mixed(optimizer: ForgeMegatronOptimizer) -> bool:
    """Float16Optimizer nests its state dict and keeps fp32 copies."""
    return hasattr(optimizer.dense, "fp32_from_float16_groups")


# ---- out


def _merged(optimizer: ForgeMegatronOptimizer) -> dict[str, Any]:
    """``{"state", "param_groups"}`` of one torch optimizer over dense and owned parameters."""
    layout, forge = optimizer.layout, optimizer.forge
    dense_groups = _torch_groups(optimizer)
    dense_at, forge_at = _positions(dense_groups), _positions(forge.param_groups)
    defaults = {} if optimizer.dense.optimizer is None else optimizer.dense.optimizer.defaults
    # The hyperparameters of another rule stand beside those of the dense parameters in the same group.
    is_megatrons = forge.rule is megatrons(optimizer.config)
    # Fused optimizers count steps in the group.
    counted = next(({"step": group["step"]} for group in dense_groups if "step" in group), {})
    unstepped = dense_states(optimizer.config)
    state, groups, of_rule = {}, [], {}
    for group, ids in zip(layout.groups, _ids(layout.groups), strict=True):
        keys = group
        for parameter, position in zip(group["params"], ids, strict=True):
            if layout.owns(parameter):
                state[position] = forge.exported_state(parameter)
                own = forge.param_groups[forge_at[id(parameter)][0]]
                # A rule may cut one of Megatron's groups into several, each with hyperparameters of its own.
                if not is_megatrons:
                    of_rule[layout.names[parameter]] = {k: v for k, v in own.items() if k not in _MEMBERS}
                elif keys is group:
                    keys = {**defaults, **counted, **own}
            else:
                stepped = _stepped(parameter)
                # Before the first step torch has no state, which a checkpoint could not be loaded without.
                held = optimizer.dense.optimizer.state.get(stepped)
                state[position] = dict(held or {name: torch.zeros_like(stepped) for name in unstepped})
                keys = dense_groups[dense_at[id(stepped)][0]]
        groups.append({k: v for k, v in keys.items() if k not in _MEMBERS} | {"params": ids})
    return {"state": state, "param_groups": groups} | ({"forge_groups": of_rule} if of_rule else {})


def _fp32_copies(optimizer: ForgeMegatronOptimizer, *, is_loading: bool) -> list[list[tuple[int, Any]]]:
    """Per group: (id, fp32 copy) of each 16-bit parameter, as Float16Optimizer keeps them.

    A weight without a master is its own copy on saving, so that a run without FORGE finds one; on loading
    there is nothing to restore.
    """
    copies = []
    for group, ids in zip(optimizer.layout.groups, _ids(optimizer.layout.groups), strict=True):
        members = []
        for parameter, position in zip(group["params"], ids, strict=True):
            if parameter.dtype.itemsize != 2:
                continue
            copy: Any = _stepped(parameter)
            if optimizer.layout.owns(parameter):
                master = optimizer.forge.state[parameter].get("master")
                copy = parameter.detach() if master is None else master
                if master is None and is_loading:
                    copy = LocalNonpersistentObject(copy)
            members.append((position, copy))
        copies.append(members)
    return copies


def _split_steps(optimizer: ForgeMegatronOptimizer, state: dict[int, dict]) -> tuple[Any, dict[str, int]]:
    """The step count that most parameters of all stages share, and the names of those that differ (frozen a while)."""
    parameters = optimizer.layout.parameters()
    names = optimizer.layout.names
    steps = over_stages({names[parameters[i]]: int(entry["step"]) for i, entry in state.items() if "step" in entry})
    if not steps:
        return None, {}
    counts = sorted(steps.values())
    common = max(set(counts), key=counts.count)
    return torch.tensor(float(common)), {name: step for name, step in steps.items() if step != common}


def _take_unsharded(optimizer: ForgeMegatronOptimizer, state: dict[int, dict]) -> dict[str, dict[str, Tensor]]:
    """By name, the states that are not weight-shaped, out of ``state``: Megatron's format has no place for them.

    A rule's running numbers, and the statistics of a layer, which every rank of the layer has whole.
    """
    layout, taken = optimizer.layout, {}
    for position, parameter in enumerate(layout.parameters()):
        entry = state.get(position, {}) if layout.owns(parameter) else {}
        own = [key for key, value in entry.items() if key != "step" and value.shape != parameter.shape]
        if own:
            taken[layout.names[parameter]] = {key: entry.pop(key).cpu() for key in own}
    return over_stages(taken)


def _of_all_stages(unsharded: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """What the first rank writes for all; a collective of the pipeline's stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return unsharded
    mine = {name: {key: value.cpu() for key, value in entry.items()} for name, entry in unsharded.items()}
    stages: list[dict] = [{}] * group.size()
    dist.all_gather_object(stages, mine, group=group)
    return {name: entry for stage in stages for name, entry in stage.items()}


def state_dict(optimizer: ForgeMegatronOptimizer) -> dict[str, Any]:
    """The local state dict of a run without FORGE."""
    merged = _merged(optimizer)
    if not _is_mixed(optimizer):
        return merged
    copies = [[copy for _, copy in group] for group in _fp32_copies(optimizer, is_loading=False)]
    return _mixed(optimizer, merged, copies)


def _mixed(optimizer: ForgeMegatronOptimizer, merged: dict, copies: list[list[Any]]) -> dict[str, Any]:
    scaler = optimizer.dense.grad_scaler
    nested = {"optimizer": merged, "fp32_from_fp16_params": copies}
    return nested if scaler is None else {**nested, "grad_scaler": scaler.state_dict()}


def sharded_state_dict(optimizer: ForgeMegatronOptimizer, model_state: dict, is_loading: bool) -> dict[str, Any]:
    """The state dict with a ShardedTensor for each state, for ``megatron.core.dist_checkpointing``.

    Args:
        model_state: the model's sharded state dict (of the model inside DDP).
        is_loading: the result is a template to load into.
    """
    if is_loading and optimizer.dense.optimizer is not None and optimizer.dense.init_state_fn is not None:
        optimizer.dense.init_state_fn(optimizer.dense.optimizer, optimizer.config)
    merged = _merged(optimizer)
    shards = get_param_id_to_sharded_param_map(model_state, optimizer.layout.parameters())
    common_step, differing = _split_steps(optimizer, merged["state"])
    unsharded = _of_all_stages(_take_unsharded(optimizer, merged["state"]))
    optim_state_to_sharding_state(merged, shards, exclude_keys=("step",))
    if common_step is not None:
        merged["state"]["common_step"] = common_step
    if groups := over_stages(merged.pop("forge_groups", {})):
        merged["forge_groups"] = groups
    if differing:
        merged["forge_steps"] = differing
    if unsharded:
        merged["forge_states"] = unsharded
    if not _is_mixed(optimizer):
        return merged
    copies = [
        [
            copy
            if isinstance(copy, LocalNonpersistentObject)
            else make_sharded_optimizer_tensor(shards[position], copy, prefix="optimizer.state.fp32_param")
            for position, copy in group
        ]
        for group in _fp32_copies(optimizer, is_loading=is_loading)
    ]
    return _mixed(optimizer, merged, copies)


# ---- in


def load_state_dict(optimizer: ForgeMegatronOptimizer, saved: dict[str, Any]) -> None:
    """Restores dense and owned parameters from :func:`state_dict`, loaded :func:`sharded_state_dict`, or
    from the optimizer state of a run without FORGE.

    Raises:
        ValueError: a group or a parameter's state is missing; names it.
    """
    layout = optimizer.layout
    mixed = _is_mixed(optimizer)
    inner = saved["optimizer"] if mixed else saved
    groups = optimizer._filter_and_reorder_param_groups(layout.groups, [dict(g) for g in inner["param_groups"]])
    ids = _ids(layout.groups)
    for ours, theirs in zip(ids, groups, strict=True):
        if len(ours) != len(theirs["params"]):
            raise ValueError(
                f"the checkpoint's parameter group has {len(theirs['params'])} parameters, the model's {len(ours)}"
            )
    copies = _saved_copies(optimizer, saved) if mixed else {}
    entries: dict[Tensor, dict] = {}
    for group, ours, theirs in zip(layout.groups, ids, groups, strict=True):
        for parameter, position, key in zip(group["params"], ours, theirs["params"], strict=True):
            entry = _entry(optimizer, inner, key, parameter, theirs)
            if layout.owns(parameter) and position in copies and "master" in optimizer.forge.state[parameter]:
                entry["master"] = copies[position]
            entries[parameter] = entry
    _load_owned(optimizer, entries, groups, inner.get("forge_groups", {}))
    _load_dense(optimizer, entries, groups, saved, copies)


def _saved_copies(optimizer: ForgeMegatronOptimizer, saved: dict[str, Any]) -> dict[int, Tensor]:
    expected = _fp32_copies(optimizer, is_loading=True)
    return {
        position: value
        for ours, theirs in zip(expected, saved["fp32_from_fp16_params"], strict=True)
        for (position, _), value in zip(ours, theirs, strict=True)
    }


def _entry(optimizer: ForgeMegatronOptimizer, inner: dict, key: int, parameter: Tensor, group: dict) -> dict:
    """One parameter's states, with the step count wherever the checkpoint keeps it."""
    name = optimizer.layout.names[parameter]
    unsharded = inner.get("forge_states", {}).get(name, {})
    if key not in inner["state"] and not unsharded:
        raise ValueError(f"{name}: the checkpoint has no optimizer state for it")
    # What has no weight-shaped state at all is in no other stage's part of the checkpoint.
    entry = {**inner["state"].get(key, {}), **unsharded}
    if name in inner.get("forge_steps", {}):
        entry["step"] = inner["forge_steps"][name]
    elif "step" not in entry:
        # torch's SGD counts no steps; what it has saved was stepped.
        first = 0 if optimizer.forge.rule.counts_steps else 1
        entry["step"] = inner["state"].get("common_step", group.get("step", first))
    return entry


def _load_owned(
    optimizer: ForgeMegatronOptimizer, entries: dict[Tensor, dict], groups: list[dict], of_rule: dict[str, dict]
) -> None:
    layout, forge = optimizer.layout, optimizer.forge
    group_of = {id(p): index for index, group in enumerate(layout.groups) for p in group["params"]}
    state, param_groups, position = {}, [], 0
    for group in forge.param_groups:
        ids = []
        for parameter in group["params"]:
            state[position] = entries[parameter]
            ids.append(position)
            position += 1
        first = group["params"][0]
        theirs = of_rule.get(layout.names[first], groups[group_of[id(first)]])
        param_groups.append({**{k: v for k, v in theirs.items() if k in group or k == "rule"}, "params": ids})
    # A group that names no rule was written by Megatron's own optimizer, or in its place.
    marker = {"version": 1, "rule": megatrons(optimizer.config).name, "exported": True}
    # The states are read in this run's recipe, whatever the checkpoint's.
    forge.load_state_dict({"state": state, "param_groups": param_groups, "forge": marker}, convert=True)


def _load_dense(optimizer: ForgeMegatronOptimizer, entries: dict, groups: list, saved: dict, copies: dict) -> None:
    if optimizer.dense.optimizer is None:
        return
    layout, dense_groups = optimizer.layout, _torch_groups(optimizer)
    places = {id(_stepped(p)): (p, index) for index, group in enumerate(layout.groups) for p in group["params"]}
    position_of = {id(p): position for position, p in enumerate(layout.parameters())}
    in_groups = not any("step" in state for state in optimizer.dense.optimizer.state.values())
    state, param_groups, dense_copies, position = {}, [], [], 0
    for group in dense_groups:
        ids, kept = [], []
        keys: dict[str, Any] = {k: v for k, v in group.items() if k != "params"}
        for stepped in group["params"]:
            parameter, index = places[id(stepped)]
            keys = {k: v for k, v in groups[index].items() if k not in _MEMBERS}
            entry = dict(entries[parameter])
            step = entry.pop("step")
            if not ("step" in keys and in_groups):
                entry["step"] = deepcopy(step)
            state[position] = entry
            ids.append(position)
            position += 1
            if parameter.dtype.itemsize == 2:
                kept.append(copies.get(position_of[id(parameter)]))
        param_groups.append({**keys, "params": ids})
        dense_copies.append(kept)
    dense: dict[str, Any] = {"state": state, "param_groups": param_groups}
    if _is_mixed(optimizer):
        dense = {**saved, "optimizer": dense, "fp32_from_fp16_params": dense_copies}
    optimizer.dense.load_state_dict(dense)
