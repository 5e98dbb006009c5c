"""What an optimizer's rule is, and the registry that finds one by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from .stages import Stages

#: Packages beside this file whose modules each hold one rule, named as the module.
REGIMES = ("fused", "split", "deferred", "projected")

_registry: dict[str, Rule] = {}


@dataclass(frozen=True, eq=False)
class Rule:
    """One optimizer, written once and run by every backend.

    Attributes:
        name: the name that :func:`get` answers to; also the rule's module name.
        states: ``torch.optim``'s names of the per-coordinate states with ``defaults``, in the order
            of ``update``.
        defaults: hyperparameters with ``torch.optim``'s names and defaults. ``lr`` is not among
            them: it is always required.
        scalars: ``(param_group, step, *running) -> floats``, with ``step`` counted from 1 at the
            first update. Computed on the host in float64 and rounded once, to the fp32 row that
            ``update`` reads as ``h``.
        update: ``(g, w, states, h) -> (w, states)`` on fp32 tiles of any shape. ``tl`` is its only
            global name, rebound per backend by :func:`forge_megatron.rules.bind`. It may ask for
            ``len(states)`` and ``len(h)``, which a compiler knows, to serve all variants. None for
            a rule that has stages.
        regime: ``"fused"``: state and weight update both read only their own coordinate, so the
            whole rule runs on a tile of the gradient (FORGE, definitions 1 and 2). ``"split"``: the
            weight update reads a whole matrix of new states. ``"deferred"``: the state update reads
            a statistic of one layer's gradient. ``"projected"``: it reads a projection of it.
        check: ``(rule, param_group) -> None``, beyond what :meth:`check_group` does for every rule;
            raises ``ValueError`` that names the hyperparameter, its value and the way out.
        states_for: ``(param_group) -> states`` where hyperparameters switch states on and off.
        initial: ``(param_group) -> {state: value}`` for the states that do not begin at 0.
        running: per-parameter numbers that ``torch.optim`` keeps beside ``step``, by torch's name,
            with their first value; 0-dim fp32 in ``state[p]``.
        advance: ``(param_group, step, *running) -> running`` after the update ``step``.
        nonnegative: the states that are never below 0: 8-bit formats then have no sign to keep.
        subtracted: the states that are squared and taken from another: 8-bit formats of theirs would make it
            negative, and are refused.
        counts_steps: ``torch.optim`` keeps ``step``; where it does not, a state that it saved is that
            of a parameter which was stepped, and of the count nothing else is read.
        fits: ``(param_group, shape) -> None``; raises ``ValueError`` where the rule cannot step a
            parameter of this shape, with the way out.
        stages_for: ``(param_group) -> Stages`` of a rule that is not fused; equal where the options
            are, so that parameters stepped alike share launches.
        statistics_for: ``(param_group, shape) -> {name: shape}`` of the states that are not
            weight-shaped, by the names of ``torch.optim`` or the authors; fp32 in every format.
        n_scalars: length of what ``scalars`` returns; worked out, not given.
        stages: of a variant; worked out, not given.
    """

    name: str
    states: tuple[str, ...]
    defaults: Mapping[str, object]
    scalars: Callable[..., tuple[float, ...]]
    update: Callable | None = None
    regime: str = "fused"
    check: Callable[[Rule, Mapping], None] | None = None
    states_for: Callable[[Mapping], tuple[str, ...]] | None = None
    initial: Callable[[Mapping], Mapping[str, float]] | None = None
    running: Mapping[str, float] = field(default_factory=dict)
    advance: Callable[..., tuple[float, ...]] | None = None
    nonnegative: tuple[str, ...] = ()
    subtracted: tuple[str, ...] = ()
    counts_steps: bool = True
    fits: Callable[[Mapping, torch.Size], None] | None = None
    stages_for: Callable[[Mapping], Stages] | None = None
    statistics_for: Callable[[Mapping, torch.Size], Mapping[str, tuple[int, ...]]] | None = None
    n_scalars: int = -1
    on_scratch: ClassVar[bool] = False
    stages: Stages | None = None
    _variants: dict[tuple, Rule] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        if self.n_scalars < 0:
            object.__setattr__(self, "n_scalars", self._count({**self.defaults, "lr": 1.0}))
        self._variants[self.states, self.n_scalars, self.stages] = self

    def _count(self, group: Mapping) -> int:
        return len(self.scalars(group, 1, *self.running.values()))

    def variant(self, group: Mapping) -> Rule:
        """Return the rule with the states, scalars and stages that it has with a group's hyperparameters.

        One object for each set of them, so that parameters stepped alike share a launch.
        """
        states = self.states if self.states_for is None else self.states_for(group)
        stages = None if self.stages_for is None else self.stages_for(group)
        key = states, self._count(group), stages
        if key not in self._variants:
            self._variants[key] = replace(self, states=states, n_scalars=key[1], stages=stages)
        return self._variants[key]

    def has_states_of(self, other: Rule) -> bool:
        """Whether a parameter that ``other``, a variant, has stepped can be stepped by this one."""
        return (self.states, self.n_scalars) == (other.states, other.n_scalars)

    def statistics(self, group: Mapping, shape: torch.Size) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the states that are not weight-shaped, by name."""
        return {} if self.statistics_for is None else self.statistics_for(group, shape)

    def resolve(self, hyperparameters: Mapping[str, object]) -> dict[str, object]:
        """Return ``defaults`` overridden by ``hyperparameters``, checked.

        Raises:
            TypeError: ``lr`` is missing, or a name is not one of the rule's.
            ValueError: a value is refused by the rule.
        """
        known = ("lr", *self.defaults)
        unknown = [name for name in hyperparameters if name not in known]
        if unknown:
            raise TypeError(
                f"{self.name} has no hyperparameter {', '.join(map(repr, unknown))}; it has: {', '.join(known)}"
            )
        if "lr" not in hyperparameters:
            raise TypeError(f"{self.name} needs lr=...: there is no default learning rate")
        group = {**self.defaults, **hyperparameters}
        self.check_group(group)
        return group

    def check_group(self, group: Mapping) -> None:
        """Raise ``ValueError`` that names a hyperparameter of ``group`` with a value out of its range."""
        for name in ("lr", "eps", "weight_decay"):
            if name == "lr" or isinstance(self.defaults.get(name), Real):
                self.require(group, name, 0.0)
        for name in (name for name, default in self.defaults.items() if isinstance(default, bool)):
            # A text from a configuration file is always true.
            if isinstance(group[name], torch.Tensor) or group[name] not in (True, False):
                raise ValueError(f"{self.name}: {name}={group[name]!r} is refused: give True or False")
        if "betas" in self.defaults:
            betas, count = group["betas"], len(self.defaults["betas"])
            if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != count:
                raise ValueError(f"{self.name}: betas={betas!r} is refused: give {count} numbers")
            for index, beta in enumerate(betas):
                _require(self.name, f"betas[{index}]", beta, 0.0, 1.0)
        if self.check is not None:
            self.check(self, group)

    def require(self, group: Mapping, name: str, low: float = -math.inf, high: float = math.inf) -> None:
        """Raise ``ValueError`` unless ``low <= group[name] < high``; NaN and infinities are refused."""
        _require(self.name, name, group[name], low, high)

    def require_whole(self, group: Mapping, name: str, low: int, high: int | None = None) -> None:
        """Raise ``ValueError`` unless ``group[name]`` is a whole number, ``low <= group[name] <= high``."""
        value = group[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < low or (high is not None and value > high):
            bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{self.name}: {name}={value!r} is refused: give a whole number {bounds}")


def register(rule: Rule) -> Rule:
    """Make ``rule`` known to :func:`get`. Raises ``ValueError`` if another has its name."""
    if _registry.setdefault(rule.name, rule) is not rule:
        raise ValueError(f"a rule named {rule.name!r} is already registered; choose another name")
    return rule


def available() -> list[str]:
    """Names that :func:`get` answers to, without importing their modules."""
    return sorted({*_registry, *_shipped()})


def get(name: str) -> Rule:
    """Return the rule called ``name``. Raises ``ValueError`` that lists what there is."""
    if name not in _registry:
        module = _shipped().get(name)
        if module is None:
            raise ValueError(f"there is no rule {name!r}; there are: {', '.join(available())}")
        importlib.import_module(module)
    return _registry[name]


def hyperparameters() -> set[str]:
    """The names of all rules' hyperparameters."""
    return {"lr"}.union(*(get(name).defaults for name in available()))


def _shipped() -> dict[str, str]:
    modules = {}
    for regime in REGIMES:
        package = importlib.import_module(f"{__package__}.{regime}")
        for module in pkgutil.iter_modules(package.__path__):
            modules[module.name] = f"{package.__name__}.{module.name}"
    return modules


def _require(rule: str, name: str, value, low: float, high: float) -> None:
    number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if not number or not low <= float(value) < high or math.isinf(float(value)):
        bounds = "" if low == -math.inf else f" of at least {low:g}"
        bounds += "" if high == math.inf else f" and below {high:g}"
        raise ValueError(f"{rule}: {name}={value!r} is refused: give a finite {name}{bounds}")
