"""The optimizers. A rule is one file under ``fused``; see :class:`Rule`."""

from .bind import bind, torch_language
from .rule import Rule, available, get, hyperparameters, register

__all__ = ["Rule", "available", "bind", "get", "hyperparameters", "register", "torch_language"]
