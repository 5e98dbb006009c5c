"""Loading optimizer state: everything is checked first, then copied in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from forge_megatron.optimizer import ForgeOptimizer

# torch's own switches of how, not what: a checkpoint's values for them mean nothing here.
_IMPLEMENTATION_KEYS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


def load_state(optimizer: ForgeOptimizer, state_dict: dict, convert: bool) -> None:
    """Restores ``state_dict`` into ``optimizer``; see :meth:`ForgeOptimizer.load_state_dict`."""
    ours = state_dict.get("forge")
    if ours is not None and ours["rule"] != optimizer.rule.name:
        raise ValueError(f"the checkpoint was written by rule {ours['rule']!r}, not {optimizer.rule.name!r}")
    saved_groups = state_dict["param_groups"]
    sources = _match(optimizer, saved_groups)
    restored: list[tuple[Tensor, dict]] = []
    for p, key in sources.items():
        entry = state_dict["state"].get(key)
        label = optimizer._parameters.labels[p]
        if entry is None:
            if ours is not None:
                raise ValueError(f"{label}: the checkpoint has no state for it")
            # torch creates a state at the first step: a parameter that never had a gradient has none.
            entry = _never_stepped(optimizer.state[p])
        restored.append((p, _checked(label, optimizer.state[p], entry, convert)))
    with torch.no_grad():
        for p, values in restored:
            for name, value in values.items():
                optimizer.state[p][name].copy_(value)
            if "master" in optimizer.state[p] and "master" not in values:
                optimizer.state[p]["master"].copy_(p)
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        kept = {"params", "param_names", *_IMPLEMENTATION_KEYS}
        group.update((key, value) for key, value in saved.items() if key not in kept)
        optimizer.rule.check(group)


def _match(optimizer: ForgeOptimizer, saved_groups: list[dict]) -> dict[Tensor, object]:
    """Which entry of the checkpoint belongs to each parameter."""
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise ValueError(f"the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(groups)}")
    sources: dict[Tensor, object] = {}
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        params, keys = group["params"], saved["params"]
        names, saved_names = group.get("param_names"), saved.get("param_names")
        if names and saved_names:
            if set(names) != set(saved_names):
                missing = sorted(set(names) ^ set(saved_names))
                raise ValueError(
                    f"group {index}: the checkpoint and the model differ in {', '.join(missing[:5])}"
                    + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
                )
            by_name = dict(zip(saved_names, keys, strict=True))
            sources.update((p, by_name[name]) for p, name in zip(params, names, strict=True))
        elif len(params) != len(keys):
            raise ValueError(f"group {index}: the checkpoint has {len(keys)} parameters, the model {len(params)}")
        else:
            sources.update(zip(params, keys, strict=True))
    return sources


def _never_stepped(state: dict) -> dict:
    return {name: torch.zeros_like(value) for name, value in state.items() if name != "master"}


def _checked(label: str, state: dict, entry: dict, convert: bool) -> dict:
    """The values to copy, one for each of our states."""
    values = {}
    for name, own in state.items():
        if name not in entry:
            if name == "master" and "forge" not in entry:
                continue
            raise ValueError(f"{label}: the checkpoint has no {name!r}")
        value = torch.as_tensor(entry[name])
        if value.shape != own.shape:
            raise ValueError(
                f"{label}: {name} is {list(value.shape)} in the checkpoint, {list(own.shape)} in the optimizer"
            )
        if value.dtype != own.dtype and name != "step" and not convert:
            raise ValueError(
                f"{label}: {name} is {value.dtype} in the checkpoint, {own.dtype} in the optimizer; attach with "
                "the checkpoint's state format, or load with convert=True"
            )
        values[name] = value
    return values
