"""A parameter's optimizer state: making it, and loading it. Everything is checked first, then copied in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forge_megatron.blocks_of_shards import allocate, decode, encode, format_for
from forge_megatron.formats import FORMAT_KEYS, StateFormat, resolve_group, scale_name, state_format_of
from forge_megatron.formats.code import SCALE_DTYPE, scale_rows, scale_shape
from forge_megatron.formats.noise import VERSION
from forge_megatron.formats.state import is_scale
from forge_megatron.groups import rule_of
from forge_megatron.kernels import Slot, is_sharded, shard_like
from forge_megatron.marker import KEY, Saved, keys_by_name, told_by
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole

# torch's own switches of how, not what: a checkpoint's values for them mean nothing here.
_IMPLEMENTATION_KEYS = {"foreach", "fused", "capturable", "differentiable"}
# Those that torch.optim has had from the start; a checkpoint of an older torch lacks others.
_EVERY_VERSION = {"lr", "betas", "eps", "weight_decay", "momentum"}


class Restorable(Saved, Protocol):
    """What loading asks of the optimizer."""

    def new_state(self, p: Tensor, label: str) -> dict[str, Tensor]:
        """The states that ``p`` would have; changes nothing."""

    def held(self, tensor: Tensor) -> Tensor:
        """What this rank steps of a parameter, or of a tensor of its shape."""

    def held_rows(self, p: Tensor) -> slice:
        """The rows of ``p`` whose states this rank has."""

    def admit(self, p: Tensor) -> None:
        """Gives ``p``, which was frozen, its states."""


def new_state(
    default: Rule, group: Mapping, p: Tensor, label: str, formats: Mapping, whole: Whole = WHOLE
) -> dict[str, Tensor]:
    """States before the first step under torch's names, and the master if the store has one.

    ``step`` and a rule's running numbers are 0-dim fp32 on the CPU.

    Args:
        default: the rule of the groups that name none.
        group: the parameter's.
        p: the parameter.
        label: what errors call it.
        formats: those of the groups that give none.
        whole: the weight of which ``p`` is a part.

    Raises:
        TypeError: a dtype that weights cannot have, naming ``label``.
        ValueError: a shape that the rule cannot step.
        NotImplementedError: a shard, of which alone the rule cannot step its part of the weight.
    """
    rule = rule_of(group, default).variant(group)
    if is_sharded(p) and rule.regime != "fused" and whole is WHOLE:
        raise NotImplementedError(
            f"{label}: {rule.name} of a weight placed as {p.placements} is not built yet; use a rule such as adamw, or "
            "a fully_shard over one mesh dimension"
        )
    try:
        if rule.fits is not None:
            rule.fits(group, whole.shape(p))
        state_format, store = resolve_group(p.dtype, group, formats)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{label}: {error}") from None
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    state.update((name, torch.tensor(value, dtype=torch.float32, device="cpu")) for name, value in rule.running.items())
    initial = {} if rule.initial is None else rule.initial(group)
    _expect_codes(rule, state_format, label)
    shapes = rule.statistics(group, whole.shape(p))
    if state_format.is_scaled and shapes and not rule.states:
        raise NotImplementedError(
            f"{label}: {rule.name} keeps {', '.join(shapes)} and no state of the weight's shape; they are always fp32, "
            f"and state_format={state_format.name!r} would change nothing; give its group state_format='fp32'"
        )
    stored = format_for(p, state_format, label)
    for name in rule.states:
        sign = name in rule.nonnegative
        state.update(allocate(stored, name, p, initial.get(name, 0.0), nonnegative=sign))
    state.update((name, torch.zeros(shape, dtype=torch.float32, device=p.device)) for name, shape in shapes.items())
    master = store.allocate(p)
    return state if master is None else {**state, "master": master}


def _expect_codes(rule: Rule, state_format: StateFormat, label: str) -> None:
    taken = [name for name in rule.states if name in rule.subtracted]
    if state_format.is_scaled and taken:
        raise ValueError(
            f"{label}: {rule.name} subtracts the square of {', '.join(taken)} from another state, and in "
            f"state_format={state_format.name!r} the difference can be below 0; use 'fp32' (in 'bf16' it is so later)"
        )


def exported(slot: Slot, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` as a checkpoint of another optimizer has it: without master and scales, 8-bit states in fp32.

    What is decoded lies on the CPU; encoding it again gives the same codes and scales, wherever the same
    coordinates share blocks.
    """
    plain = {name: value for name, value in state.items() if name != "master"}
    for name, code, scale in zip(slot.rule.states, slot.codes(), slot.scales, strict=False):
        plain[name] = code.load(state[name].cpu(), scale.cpu())
        del plain[scale_name(name)]
    return plain


def load_state(optimizer: Restorable, state_dict: dict, convert: bool) -> None:
    """Restores ``state_dict`` into ``optimizer``; see :meth:`ForgeOptimizer.load_state_dict`."""
    missing = {"state", "param_groups"} - state_dict.keys()
    if missing:
        raise ValueError(f"not an optimizer's state_dict: it has no {', '.join(map(repr, sorted(missing)))}")
    ours, told = state_dict.get(KEY), told_by(state_dict)
    _expect_same_random_bits(optimizer, told)
    saved_groups = state_dict["param_groups"]
    sources = _match(optimizer, saved_groups)
    strangers = state_dict["state"].keys() - set(sources.values())
    if strangers:
        raise ValueError(f"the checkpoint has states of {len(strangers)} parameters that are in none of its groups")
    rules: dict[Tensor, Rule] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        rule, loaded = _hyperparameters(optimizer, group, saved, None if ours is None else ours["rule"])
        rules.update(dict.fromkeys(group["params"], rule))
        groups.append(loaded)
    restored: dict[Tensor, dict[str, Tensor]] = {}
    converted: set[tuple[str, str]] = set()
    for p, key in sources.items():
        label = optimizer.names[p]
        entry = state_dict["state"].get(key)
        if not entry:
            if ours is not None and key not in ours["frozen"]:
                raise ValueError(f"{label}: the checkpoint has no state for it")
            # torch creates a state at the first step: a parameter that never had a gradient has none.
            if p in optimizer.state:
                restored[p] = {k: v for k, v in optimizer.new_state(p, label).items() if k != "master"}
            continue
        own = optimizer.state[p] if p in optimizer.state else optimizer.new_state(p, label)
        _expect_known_rows(optimizer, rules[p], p, entry, told)
        entry = _held(optimizer, p, own, entry)
        made = {"master"} if ours is None else set()
        if convert:
            entry = _converted(rules[p], own, entry, converted)
            made |= _converted_master(own, entry, converted)
        elif "master" in entry and "master" not in own:
            raise ValueError(
                f"{label}: the checkpoint has an fp32 master, the optimizer has none; attach with "
                "weight_store='master', or load with convert=True, which drops it"
            )
        restored[p] = _checked(rules[p], label, own, entry, made, from_torch=ours is None)
    with torch.no_grad():
        for p, values in restored.items():
            if p not in optimizer.state:
                optimizer.admit(p)
            for name, value in values.items():
                optimizer.state[p][name].copy_(value)
            if "master" in optimizer.state[p] and "master" not in values:
                optimizer.state[p]["master"].copy_(optimizer.held(p))
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update(loaded)
    if converted and not (ours or {}).get("exported"):
        pairs = ", ".join(f"{ours} to {theirs}" for ours, theirs in sorted(converted))
        warnings.warn(f"states of the checkpoint were converted from {pairs}", stacklevel=3)
    optimizer.random.seed = told.get("seed", optimizer.random.seed)
    windows = told.get("windows", {})
    for p, key in sources.items():
        if p in optimizer.owned and key in windows:
            optimizer.owned[p].last_window = windows[key]


def _expect_known_rows(optimizer: Restorable, rule: Rule, p: Tensor, entry: Mapping, told: Mapping) -> None:
    """Raises if ``entry`` has some rank's rows of a weight, and nothing says whose."""
    shape = p.shape if is_sharded(p) else optimizer.held(p).shape
    if shape == p.shape or told.keys() & {"shard", "exported"}:
        return
    for name in (*rule.states, "master"):
        if getattr(entry.get(name), "shape", None) == shape:
            raise ValueError(
                f"{optimizer.names[p]}: {name} is a rank's rows in the checkpoint, which does not say of which "
                "rank; save state_dict(full=True)"
            )


def _held(optimizer: Restorable, p: Tensor, own: Mapping, entry: Mapping) -> dict:
    """This rank's rows of states that the checkpoint has whole, and of their scales."""
    held = dict(entry)
    for name, value in entry.items():
        shape = getattr(value, "shape", None)
        if is_scale(name) and value.dtype is not SCALE_DTYPE:
            raise ValueError(
                f"{optimizer.names[p]}: {name} is {value.dtype} in the checkpoint, which codes of an earlier version "
                "have; resume with the forge_megatron that wrote it"
            )
        if is_scale(name) and shape == scale_shape(p.shape) and not is_sharded(value):
            held[name] = value[scale_rows(p, optimizer.held_rows(p))]
        elif name in own and own[name].dim() and own[name].shape != shape == p.shape:
            held[name] = optimizer.held(value)
    return held


def _expect_same_random_bits(optimizer: Restorable, ours: dict) -> None:
    if optimizer.random and ours.get("random", VERSION) != VERSION:
        raise ValueError(
            f"the checkpoint's weights were rounded with version {ours['random']} of the random bits, this is "
            f"version {VERSION}; resume with the forge_megatron that wrote it"
        )


def _hyperparameters(optimizer: Restorable, group: dict, saved: dict, written_by: str | None) -> tuple[Rule, dict]:
    """The rule's variant, and what the checkpoint says of a group, checked by the rule.

    Args:
        optimizer: see :class:`Restorable`.
        group: the optimizer's.
        saved: the checkpoint's.
        written_by: the rule of the checkpoint's groups that name none; None: the group's, as far as is known.
    """
    family = rule_of(group, optimizer.rule)
    writer = saved.get("rule", written_by or family.name)
    if writer != family.name:
        raise ValueError(f"the checkpoint was written by rule {writer!r}, not {family.name!r}")
    kept = {"params", "param_names", "rule", KEY, *FORMAT_KEYS, *_IMPLEMENTATION_KEYS}
    # A schedule writes to a tensor in place, which must not be the checkpoint's.
    loaded = {key: copy.deepcopy(value) for key, value in saved.items() if key not in kept}
    merged = {**group, **loaded}
    expected = {"lr", *family.defaults} if written_by is not None else {"lr", *family.defaults} & _EVERY_VERSION
    missing = sorted(expected - saved.keys())
    if missing:
        raise ValueError(f"the checkpoint has a parameter group without {', '.join(map(repr, missing))}")
    family.check_group(merged)
    rule, needed = family.variant(group), family.variant(merged)
    if not needed.has_states_of(rule):
        raise ValueError(
            f"the checkpoint's hyperparameters need the states {', '.join(needed.states) or 'none'}, and the "
            f"optimizer has {', '.join(rule.states) or 'none'}; attach with the checkpoint's hyperparameters"
        )
    return rule, loaded


def _match(optimizer: Restorable, saved_groups: list[dict]) -> dict[Tensor, object]:
    """Which entry of the checkpoint belongs to each parameter."""
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise ValueError(f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}")
    sources: dict[Tensor, object] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        params, keys = group["params"], saved["params"]
        names, saved_names = group.get("param_names"), saved.get("param_names")
        if saved_names and len(saved_names) != len(keys):
            raise ValueError(f"group {index}: the checkpoint has {len(saved_names)} names for {len(keys)} parameters")
        if names and saved_names:
            if set(names) != set(saved_names):
                missing = sorted(set(names) ^ set(saved_names))
                raise ValueError(
                    f"group {index}: the checkpoint and the model differ in {', '.join(missing[:5])}"
                    + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                )
            by_name = keys_by_name(saved, f"group {index}")
            sources.update((p, by_name[name]) for p, name in zip(params, names, strict=True))
        elif len(params) != len(keys):
            raise ValueError(f"group {index}: the checkpoint has {len(keys)} parameters, the model {len(params)}")
        else:
            sources.update(zip(params, keys, strict=True))
    return sources


def _converted(rule: Rule, state: dict, entry: dict, converted: set[tuple[str, str]]) -> dict:
    """``entry`` with its states in the formats of ``state``; adds what was converted to what."""
    entry = dict(entry)
    for name in rule.states:
        value = torch.as_tensor(entry[name]) if name in entry else state[name]
        if value.dtype is state[name].dtype or value.shape != state[name].shape:
            continue
        sign = name in rule.nonnegative
        fmt = state_format_of(state[name])
        decoded = _decoded(value, entry.pop(scale_name(name), None), sign)
        entry[name], scale = encode(fmt.code(nonnegative=sign), decoded, state[name])
        if scale is not None:
            entry[scale_name(name)] = scale
        converted.add((str(value.dtype).removeprefix("torch."), fmt.name))
    return entry


def _converted_master(state: dict, entry: dict, converted: set[tuple[str, str]]) -> set[str]:
    """Takes a master that has no place out of ``entry``; adds what becomes of it.

    Returns:
        What the weights are to make of themselves because ``entry`` lacks it.
    """
    if ("master" in state) is ("master" in entry):
        return set()
    converted.add(("weights alone", "fp32 masters") if "master" in state else ("fp32 masters", "weights alone"))
    entry.pop("master", None)
    return {"master"}


def _decoded(stored: Tensor, scale: Tensor | None, nonnegative: bool) -> Tensor:
    if scale is None:
        return stored.float()
    return decode(state_format_of(stored).code(nonnegative=nonnegative), stored, scale)


def _checked(
    rule: Rule, label: str, state: dict, entry: dict, made: set[str], *, from_torch: bool
) -> dict[str, Tensor]:
    """The values to copy, one for each of our states but those that are ``made``; torch has not all a count."""
    values = {}
    for name, own in state.items():
        if entry.get(name) is None:
            if name in made:
                continue
            if from_torch and name == "step" and not rule.counts_steps:
                values[name] = torch.ones(())
                continue
            way_out = "; attach without masters, or load with convert=True, which makes it" if name == "master" else ""
            raise ValueError(f"{label}: the checkpoint has no {name!r}{way_out}")
        value = torch.as_tensor(entry[name])
        if is_sharded(own) and not is_sharded(value) and value.shape == own.shape:
            value = shard_like(value, own)
        if value.shape != own.shape:
            raise ValueError(
                f"{label}: {name} is {list(value.shape)} in the checkpoint, {list(own.shape)} in the optimizer"
            )
        if name == "step" and not value >= 0:
            raise ValueError(f"{label}: step is {value.item()} in the checkpoint")
        if value.dtype != own.dtype and name not in ("step", "master", *rule.running):
            raise ValueError(
                f"{label}: {name} is {value.dtype} in the checkpoint, {own.dtype} in the optimizer; attach with "
                "the checkpoint's state format, or load with convert=True"
            )
        values[name] = value
    surplus = sorted(str(name) for name, value in entry.items() if value is not None and name not in state)
    if surplus:
        raise ValueError(
            f"{label}: the checkpoint has {', '.join(map(repr, surplus))}, which the optimizer would lose; attach with "
            "the checkpoint's hyperparameters and formats"
        )
    return values
