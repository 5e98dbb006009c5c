"""Formats: how states and weights lie in memory between two steps."""

from .noise import Noise, Origin
from .recipe import RECIPES, resolve_recipe
from .state import StateFormat, state_format, state_format_of
from .store import WeightStore, weight_store

__all__ = [
    "RECIPES",
    "Noise",
    "Origin",
    "StateFormat",
    "WeightStore",
    "resolve_recipe",
    "state_format",
    "state_format_of",
    "weight_store",
]
