"""The optimizers. A rule is one file under ``fused``; see :class:`Rule`."""

from .bind import bind, torch_language
from .rule import Rule, available, get, register

__all__ = ["Rule", "available", "bind", "get", "register", "torch_language"]
