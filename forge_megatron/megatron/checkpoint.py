"""Optimizer state in Megatron's own checkpoint format.

A run with FORGE writes what the same run without it would write: one entry a parameter, keyed by the
parameter's name (``optimizer.state.exp_avg.<key>``), param groups in Megatron's order, one step count. So
either kind of run reads the other's checkpoint, on any tensor-parallel size, and no conversion is needed.
Under the distributed optimizer each data-parallel rank writes its rows of a state, with the same keys, so that any
number of ranks reads them, with sharded states or without. 8-bit states are written in fp32, from which they are read
with the same codes, unless another tensor-parallel size cuts their blocks of 64 elsewhere. For another number of
expert-parallel ranks see :mod:`forge_megatron.megatron.resharded`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from forge_megatron.kernels import is_sharded, local, placed_as
from forge_megatron.megatron.codes import shards_of, values_of
from forge_megatron.megatron.dense import Dense
from forge_megatron.megatron.rows import sharded_rows
from forge_megatron.megatron.rule import megatrons
from forge_megatron.megatron.stages import over_stages

if TYPE_CHECKING:
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer

# What a param group has besides hyperparameters.
_MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class Layout:
    """The parameters of one of Megatron's optimizers (dense, or experts) in the order of a run without FORGE.

    Attributes:
        groups: ``_get_param_groups``' groups, all parameters in them.
        names: parameter to global name.
        owned: the ids of the parameters that FORGE steps.
        group: the ranks that together have each name once.
    """

    groups: list[dict[str, Any]]
    names: dict[Tensor, str]
    owned: frozenset[int]
    group: dist.ProcessGroup

    def parameters(self) -> list[Tensor]:
        """The model's parameters; the position is the id in a state dict."""
        return list(chain.from_iterable(group["params"] for group in self.groups))

    def owns(self, parameter: Tensor) -> bool:
        return id(parameter) in self.owned

    def dense(self) -> list[Tensor]:
        """The parameters that Megatron's optimizer steps."""
        return [p for p in self.parameters() if not self.owns(p)]


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


# ---- out


def _merged(optimizer: ForgeMegatronOptimizer, dense: Dense) -> dict[str, Any]:
    """``{"state", "param_groups"}`` of one torch optimizer over dense and owned parameters."""
    layout, forge = optimizer.layout, optimizer.forge
    forge_at = _positions(forge.param_groups)
    # The hyperparameters of another rule stand beside those of the dense parameters in the same group.
    is_megatrons = forge.rule is megatrons(optimizer.config)
    counted = dense.counted()
    state, groups, of_rule = {}, [], {}
    for group, ids in zip(layout.groups, _ids(layout.groups), strict=True):
        keys = group
        cut = len({forge_at[id(p)][0] for p in group["params"] if layout.owns(p)}) > 1
        for parameter, position in zip(group["params"], ids, strict=True):
            if layout.owns(parameter):
                state[position] = forge.exported_state(parameter)
                own = forge.param_groups[forge_at[id(parameter)][0]]
                # A rule may cut one of Megatron's groups into several, each with hyperparameters of its own.
                if cut or not is_megatrons:
                    of_rule[layout.names[parameter]] = {k: v for k, v in own.items() if k not in _MEMBERS}
                if is_megatrons and keys is group:
                    keys = {**dense.defaults, **counted, **own}
            else:
                state[position] = dense.state(parameter)
                keys = dense.group(parameter)
        groups.append({k: v for k, v in keys.items() if k not in _MEMBERS} | {"params": ids})
    return {"state": state, "param_groups": groups} | ({"forge_groups": of_rule} if of_rule else {})


def _fp32_copies(
    optimizer: ForgeMegatronOptimizer, dense: Dense, *, is_loading: bool
) -> list[dict[int, tuple[Tensor, Tensor]]]:
    """Per group, in its order: (parameter, fp32 copy) of each 16-bit parameter, as Float16Optimizer keeps them.

    A weight without a master is its own copy on saving, so that a run without FORGE finds one; on loading
    there is nothing to restore.
    """
    copies = []
    for members in _sixteen_bit(optimizer.layout):
        found = {}
        for index, parameter in enumerate(members):
            if not optimizer.layout.owns(parameter):
                found[index] = parameter, dense.copy(parameter)
            elif "master" in optimizer.forge.state[parameter]:
                found[index] = parameter, optimizer.forge.state[parameter]["master"]
            elif not is_loading:
                found[index] = parameter, values_of(parameter)
        copies.append(found)
    return copies


def _sixteen_bit(layout: Layout) -> list[list[Tensor]]:
    return [[p for p in group["params"] if p.dtype.itemsize == 2] for group in layout.groups]


def _split_steps(optimizer: ForgeMegatronOptimizer, state: dict[int, dict]) -> tuple[Any, dict[str, int]]:
    """The step count that most parameters of all stages share, and the names of those that differ (frozen a while)."""
    parameters = optimizer.layout.parameters()
    names = optimizer.layout.names
    counted = {names[parameters[i]]: int(entry["step"]) for i, entry in state.items() if "step" in entry}
    steps = over_stages(counted, optimizer.layout.group)
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
        shapes = parameter.shape, optimizer.forge.held(parameter).shape
        own = [key for key, value in entry.items() if key != "step" and value.shape not in shapes]
        if own:
            taken[layout.names[parameter]] = {key: entry.pop(key).cpu() for key in own}
    return over_stages(taken, layout.group)


def state_dict(optimizer: ForgeMegatronOptimizer) -> dict[str, Any]:
    """The local state dict of a run without FORGE."""
    dense = optimizer.dense_held()
    merged = _merged(optimizer, dense)
    if not dense.keeps_copies:
        return merged
    copies = [[copy for _, copy in g.values()] for g in _fp32_copies(optimizer, dense, is_loading=False)]
    return _mixed(optimizer, merged, copies)


def _mixed(optimizer: ForgeMegatronOptimizer, merged: dict, copies: list | dict) -> dict[str, Any]:
    scaler = optimizer.dense.grad_scaler
    nested = {"optimizer": merged, "fp32_from_fp16_params": copies}
    return nested if scaler is None else {**nested, "grad_scaler": scaler.state_dict()}


def sharded_state_dict(optimizer: ForgeMegatronOptimizer, model_state: dict, is_loading: bool) -> dict[str, Any]:
    """The state dict with a ShardedTensor for each state, for ``megatron.core.dist_checkpointing``.

    Args:
        model_state: the model's sharded state dict (of the model inside DDP).
        is_loading: the result is a template to load into.
    """
    dense = optimizer.dense_held()
    if is_loading:
        dense.make_states()
    merged = _merged(optimizer, dense)
    parameters = optimizer.layout.parameters()
    _expect_even_shards(optimizer.layout.names)
    shards = shards_of(model_state, parameters)
    common_step, differing = _split_steps(optimizer, merged["state"])
    unsharded = _take_unsharded(optimizer, merged["state"])
    merged["state"] = {
        position: {
            name: _sharded(optimizer, shards[position], parameters[position], value, f"optimizer.state.{name}")
            for name, value in entry.items()
            if name != "step"
        }
        for position, entry in merged["state"].items()
    }
    for group in merged["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])
    if common_step is not None:
        merged["state"]["common_step"] = common_step
    if groups := over_stages(merged.pop("forge_groups", {}), optimizer.layout.group):
        merged["forge_groups"] = groups
    if differing:
        merged["forge_steps"] = differing
    if unsharded:
        merged["forge_states"] = unsharded
    if not dense.keeps_copies:
        return merged
    # Of lists dist_checkpointing loses the positions of what a rank does not load.
    keys = {p: position for position, p in enumerate(parameters)}
    copies = {
        group: {
            index: _sharded(optimizer, shards[keys[p]], p, copy, "optimizer.state.fp32_param")
            for index, (p, copy) in members.items()
        }
        for group, members in enumerate(_fp32_copies(optimizer, dense, is_loading=is_loading))
        if members
    }
    return _mixed(optimizer, merged, copies)


def _expect_even_shards(names: dict[Tensor, str]) -> None:
    """Megatron places a rank's shard by its number among equal ones, and would write the last rows elsewhere."""
    for p, name in names.items():
        if is_sharded(p) and p.shape[0] % p.device_mesh.size():
            raise NotImplementedError(
                f"{name}: FSDP2 has cut {p.shape[0]} rows into {p.device_mesh.size()} unequal shards, which Megatron's "
                "ShardedTensor does not describe; save state_dict() with --ckpt-format torch_dcp"
            )


def _sharded(optimizer: ForgeMegatronOptimizer, shard: Any, parameter: Tensor, value: Tensor, prefix: str) -> Any:
    """A state, or an fp32 copy, as it is saved: the whole of the weight's shard, or this rank's rows of it."""
    if value.shape == parameter.shape:
        return make_sharded_optimizer_tensor(shard, value, prefix)
    forge = optimizer.forge
    return sharded_rows(shard, value, forge.held_rows(parameter), prefix, forge.copy_of_states)


# ---- in


def load_state_dict(optimizer: ForgeMegatronOptimizer, saved: dict[str, Any]) -> None:
    """Restores dense and owned parameters from :func:`state_dict`, loaded :func:`sharded_state_dict`, or
    from the optimizer state of a run without FORGE.

    Raises:
        ValueError: a group or a parameter's state is missing; names it.
    """
    layout = optimizer.layout
    dense = optimizer.dense_held()
    mixed = dense.keeps_copies
    inner = saved["optimizer"] if mixed else saved
    groups = optimizer._filter_and_reorder_param_groups(layout.groups, [dict(g) for g in inner["param_groups"]])
    for group, theirs in zip(layout.groups, groups, strict=True):
        here, there = len(group["params"]), len(theirs["params"])
        if here != there:
            raise ValueError(f"the checkpoint's parameter group has {there} parameters, the model's {here}")
    copies = _saved_copies(optimizer, saved) if mixed else {}
    entries: dict[Tensor, dict] = {}
    for group, theirs in zip(layout.groups, groups, strict=True):
        for parameter, key in zip(group["params"], theirs["params"], strict=True):
            entry = _entry(optimizer, inner, key, parameter, theirs)
            if layout.owns(parameter) and parameter in copies and "master" in optimizer.forge.state[parameter]:
                entry["master"] = copies[parameter]
            entries[parameter] = _placed(parameter, entry) if is_sharded(parameter) else entry
    _load_owned(optimizer, entries, groups, inner.get("forge_groups", {}))
    hyperparameters = [{k: v for k, v in group.items() if k not in _MEMBERS} for group in groups]
    of_parameter = {
        p: theirs for group, theirs in zip(layout.groups, hyperparameters, strict=True) for p in group["params"]
    }
    dense.load(entries, of_parameter, copies, saved)


def _placed(parameter: Tensor, entry: dict) -> dict:
    """dist_checkpointing gives this rank's part alone."""
    shape = local(parameter).shape
    return {
        name: placed_as(parameter, value, parameter.shape)
        if isinstance(value, Tensor) and value.dim() and value.shape == shape and not is_sharded(value)
        else value
        for name, value in entry.items()
    }


def _saved_copies(optimizer: ForgeMegatronOptimizer, saved: dict[str, Any]) -> dict[Tensor, Tensor]:
    parameters = _sixteen_bit(optimizer.layout)
    if "fp32_from_fp16_params" not in saved:
        # A template that asks for none leaves nothing where another layout has written it.
        state, owns = optimizer.forge.state, optimizer.layout.owns
        asks = next((p for group in parameters for p in group if not owns(p) or "master" in state[p]), None)
        if asks is not None:
            raise ValueError(f"{optimizer.layout.names[asks]}: the checkpoint has no fp32 copy of it")
        return {}
    return {
        parameters[group][index]: value
        for group, members in _items(saved["fp32_from_fp16_params"])
        for index, value in _items(members)
    }


def _items(members: dict[int, Any] | list[Any]) -> Iterable[tuple[int, Any]]:
    return members.items() if isinstance(members, dict) else enumerate(members)


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
