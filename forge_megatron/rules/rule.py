"""What an optimizer's rule is, and the registry that finds one by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Packages beside this file whose modules each hold one rule, named as the module.
REGIMES = ("fused",)

_registry: dict[str, Rule] = {}


@dataclass(frozen=True, eq=False)
class Rule:
    """One optimizer, written once and run by every backend.

    Attributes:
        name: the name that :func:`get` answers to; also the rule's module name.
        regime: ``"fused"``: state and weight update both read only their own coordinate, so the
            whole rule runs on a tile of the gradient (FORGE, definitions 1 and 2).
        states: ``torch.optim``'s names of the per-coordinate states, in the order of ``update``.
        defaults: hyperparameters with ``torch.optim``'s names and defaults. ``lr`` is not among
            them: it is always required.
        n_scalars: length of what ``scalars`` returns.
        scalars: ``(param_group, step) -> floats``, with ``step`` counted from 1 at the first
            update. Computed on the host in float64 and rounded once, to the fp32 row that
            ``update`` reads as ``h``.
        update: ``(g, w, states, h) -> (w, states)`` on fp32 tiles of any shape. ``tl`` is its only
            global name, rebound per backend by :func:`forge_megatron.rules.bind`.
        check: ``(param_group) -> None``; raises ``ValueError`` that names the hyperparameter, its
            value and the way out.
    """

    name: str
    regime: str
    states: tuple[str, ...]
    defaults: Mapping[str, object]
    n_scalars: int
    scalars: Callable[[Mapping, int], tuple[float, ...]]
    update: Callable
    check: Callable[[Mapping], None]

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
        self.check(group)
        return group


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


def _shipped() -> dict[str, str]:
    modules = {}
    for regime in REGIMES:
        package = importlib.import_module(f"{__package__}.{regime}")
        for module in pkgutil.iter_modules(package.__path__):
            modules[module.name] = f"{package.__name__}.{module.name}"
    return modules


def require(rule: str, name: str, value, low: float, high: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``low <= value < high``; NaN and infinities are refused."""
    if not low <= float(value) < high:
        bounds = f"at least {low:g}" + ("" if high == math.inf else f" and below {high:g}")
        raise ValueError(f"{rule}: {name}={value!r} is refused: give a finite {name} of {bounds}")


def require_off(rule: str, group: Mapping, name: str, way_out: str) -> None:
    """Raise ``ValueError`` if the hyperparameter ``name``, which ``rule`` lacks, is switched on."""
    if group.get(name):
        raise ValueError(f"{rule}: {name}={group[name]!r} is not built; {way_out}")
