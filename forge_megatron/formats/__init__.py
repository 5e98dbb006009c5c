"""Formats: how states and weights lie in memory between two steps."""

from .noise import Noise, Origin
from .recipe import FORMAT_KEYS, RECIPES, WEIGHT_DTYPES, resolve_group, resolve_recipe
from .state import StateFormat, scale_name, state_format, state_format_of
from .store import WeightStore, weight_store
from .weight import Fp8Weight, in_memory

__all__ = [
    "FORMAT_KEYS",
    "RECIPES",
    "WEIGHT_DTYPES",
    "Fp8Weight",
    "Noise",
    "Origin",
    "StateFormat",
    "WeightStore",
    "in_memory",
    "resolve_group",
    "resolve_recipe",
    "scale_name",
    "state_format",
    "state_format_of",
    "weight_store",
]
