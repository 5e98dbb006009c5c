"""The optimizers. A rule is one file under the folder of its regime; see :class:`Rule`."""

from .bind import bind, torch_language
from .rule import Rule, available, get, hyperparameters, register
from .stages import Stage, Stages

__all__ = [
    "Rule",
    "Stage",
    "Stages",
    "available",
    "bind",
    "get",
    "hyperparameters",
    "register",
    "torch_language",
]
