"""What a checkpoint says of the optimizer besides torch's two entries, and where it says it.

``state_dict()["forge"]`` has all of it. The functions of ``torch.distributed.checkpoint.state_dict`` keep ``state`` and
``param_groups`` alone: what a resumed run could not do without is in each group too. Their flattened form keeps of a
group only what every optimizer has in it, and nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from forge_megatron.formats.noise import VERSION
from forge_megatron.linear import OwnedWeight
from forge_megatron.random_bits import RandomBits
from forge_megatron.rules import Rule

#: The entry's name, in a state_dict and in its groups.
KEY = "forge"


class Saved(Protocol):
    """What is told of an optimizer."""

    rule: Rule
    names: Mapping[Tensor, str]
    param_groups: list[dict]
    state: Mapping[Tensor, dict[str, Tensor]]
    owned: Mapping[Tensor, OwnedWeight]
    random: RandomBits


def marker(optimizer: Saved) -> dict[str, Any]:
    """Of the whole state_dict."""
    frozen = [index for index, p in enumerate(optimizer.names) if p not in optimizer.state]
    # How long a window was decides what the next one keeps, and so the order of its sums.
    windows = [_window(optimizer, p) for p in optimizer.names]
    rule = optimizer.rule.name
    return {"version": 1, "rule": rule, "frozen": frozen, "windows": windows, **_random(optimizer)}


def mark_groups(optimizer: Saved, state_dict: dict, *, any_length: bool) -> None:
    """Puts into each group what its parameters are resumed with, as far as this optimizer uses it.

    Args:
        optimizer: whose ``state_dict`` it is, with its marker.
        any_length: a window has any number of micro-batches.
    """
    common = _random(optimizer) if optimizer.random else {}
    common |= {key: value for key, value in state_dict[KEY].items() if key == "shard"}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        told = dict(common)
        if any_length and any(p in optimizer.owned for p in group["params"]):
            told["windows"] = [_window(optimizer, p) for p in group["params"]]
        if told:
            saved[KEY] = told


def told_by(state_dict: Mapping) -> dict[str, Any]:
    """The marker of a state_dict, or what is left of it in its groups; ``windows`` by the parameters' keys."""
    if (whole := state_dict.get(KEY)) is not None:
        return {**whole, "windows": dict(enumerate(whole.get("windows", ())))}
    told: dict[str, Any] = {}
    windows: dict[object, int] = {}
    for group in state_dict.get("param_groups", ()):
        of_group = dict(group.get(KEY, {}))
        # torch puts the parameters of a group into the order of the optimizer that reads them, and nothing else of it.
        written = group["params"] if _are_names(group) is None else group["param_names"]
        windows.update(zip(written, of_group.pop("windows", ()), strict=False))
        told.update(of_group)
    return {**told, "windows": windows} if windows or told else {}


def keys_by_name(group: Mapping, label: str) -> dict[str, object]:
    """The key of each parameter of a checkpoint's group whose parameters have names.

    Raises:
        ValueError: the keys are names themselves, and others.
    """
    names, keys = group["param_names"], group["params"]
    same = _are_names(group)
    if same is None:
        return dict(zip(names, keys, strict=True))
    if not same:
        raise ValueError(
            f"{label}: the checkpoint calls its parameters {keys[0]!r} ... and {names[0]!r} ..., which may be in "
            "another order; save optimizer.state_dict() itself"
        )
    return {name: name for name in names}


def _are_names(group: Mapping) -> bool | None:
    """Whether the keys of a group's parameters are their names; None: they are numbers, or there are no names."""
    names, keys = group.get("param_names"), group["params"]
    if not names or not keys or not all(isinstance(key, str) for key in keys):
        return None
    return set(names) == set(keys)


def _random(optimizer: Saved) -> dict[str, int]:
    return {"seed": optimizer.random.seed, "random": VERSION}


def _window(optimizer: Saved, p: Tensor) -> int:
    return optimizer.owned[p].last_window if p in optimizer.owned else 0
