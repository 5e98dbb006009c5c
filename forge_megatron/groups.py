"""Param groups: what their members are called, and which rule steps them with which hyperparameters."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping

from torch import Tensor

from forge_megatron import rules
from forge_megatron.coordinator.plan import plan
from forge_megatron.formats import FORMAT_KEYS
from forge_megatron.rules import Rule

#: What a group has besides hyperparameters.
_STRUCTURE = {"params", "param_names", "rule", *FORMAT_KEYS}

#: What decides when weights are stepped: of all groups together.
_OF_ALL = inspect.signature(plan).parameters.keys()


def rule_of(group: Mapping, default: Rule) -> Rule:
    """The rule that a group names (``{"params": ..., "rule": "adamw"}``), or the optimizer's."""
    return rules.get(group["rule"]) if "rule" in group else default


def formats_of(group: Mapping) -> dict[str, str]:
    """The formats of states and weights that a group names itself."""
    return {key: group[key] for key in FORMAT_KEYS if group.get(key) is not None}


def complete(group: dict, rule: Rule, defaults: Mapping) -> dict:
    """``group`` with every hyperparameter of its rule, checked.

    A group that names another rule than the optimizer's has that rule's defaults, and gives its own ``lr``.

    Args:
        group: as the user gives it.
        rule: the optimizer's.
        defaults: the optimizer's hyperparameters.

    Raises:
        TypeError: a hyperparameter that the group's rule does not read; no ``lr`` beside another rule.
        ValueError: an unknown rule, or a value that is refused.
    """
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group must be a dict, and is a {type(group).__name__}")
    own = rule_of(group, rule)
    common = sorted(group.keys() & _OF_ALL)
    if common:
        raise TypeError(f"a parameter group gives {', '.join(common)}, which is of all groups; give it beside them")
    further = group.keys() - {"lr", *own.defaults} - _STRUCTURE
    unread = sorted(_hyperparameters(further)) if further else []
    if unread:
        raise TypeError(
            f"a parameter group gives {', '.join(map(repr, unread))}, which {own.name} does not have; "
            f"it has: {', '.join(('lr', *own.defaults))}"
        )
    if own is not rule:
        defaults = own.resolve({name: value for name, value in group.items() if name in ("lr", *own.defaults)})
    completed = {**defaults, **group}
    own.check_group(completed)
    return completed


def _hyperparameters(keys: Iterable[str]) -> Iterator[str]:
    """Those of a group's keys that are some rule's hyperparameter, or one that is misspelt; others are its owner's."""
    known = rules.hyperparameters()
    # Below 0.86 are layer_decay and weight_decay_mult, which others keep in groups.
    return (key for key in keys if key in known or difflib.get_close_matches(key, known, 1, 0.86))


def named_parameters(groups: list[dict]) -> list[tuple[str, Tensor]]:
    """What errors and tables call each parameter, in the order of the groups."""
    named: list[tuple[str, Tensor]] = []
    for group in groups:
        names = group.get("param_names") or itertools.repeat(None)
        for name, p in zip(names, group["params"], strict=False):
            named.append((name or f"parameter {len(named)}", p))
    return named


def joining(group: dict, groups: list[dict], names: Mapping[Tensor, str], trained: Container[Tensor]) -> dict:
    """``group`` as ``torch.optim`` takes it beside ``groups``.

    Its members are named where the others are. One that is among the others and was frozen so far moves: a
    model's frozen parameters are in a group from the start.
    """
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else members
    if isinstance(members, set):
        return group
    members = [member if isinstance(member, tuple) else (None, member) for member in members]
    moving = {p for _, p in members if p in names and p not in trained}
    for other in groups if moving else ():
        stays = [index for index, p in enumerate(other["params"]) if p not in moving]
        for key in ("params", "param_names"):
            if key in other:
                other[key] = [other[key][index] for index in stays]
    if not any("param_names" in other for other in groups):
        return {**group, "params": [p if name is None else (name, p) for name, p in members]}
    taken = itertools.count(len(names))
    named = [(name or names.get(p) or f"unnamed.{next(taken)}", p) for name, p in members]
    return {**group, "params": named} if named else {**group, "params": [], "param_names": []}
