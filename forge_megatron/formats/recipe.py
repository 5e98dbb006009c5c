"""Named pairs of a state format and a weight store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .state import StateFormat, state_format
from .store import WeightStore, weight_store

#: recipe -> (state format, weight store). A comparison is only ever drawn within one recipe.
RECIPES = {
    "fp32-state": ("fp32", "nearest"),
    "bf16-state": ("bf16", "nearest"),
    "fp32-master": ("fp32", "master"),
    "sr-store": ("bf16", "stochastic"),
    "int8": ("int8", "nearest"),
    "fp8": ("fp8", "nearest"),
    "fp8-weight": ("bf16", "fp8"),
}

#: Those that a weight can be stepped in.
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: What a param group may say of formats.
FORMAT_KEYS = ("recipe", "state_format", "weight_store")


def resolve_recipe(
    dtype: torch.dtype,
    recipe: str | None = None,
    *,
    state_format: str | None = None,
    weight_store: str | None = None,
) -> tuple[StateFormat, WeightStore]:
    """Return the formats of a weight of ``dtype``.

    With nothing given, states have the parameter's dtype and the store is ``nearest``. fp16 is the
    exception: its states are fp32, because a second moment under 6e-8 is zero in fp16 and the
    update then divides by ``eps`` alone.

    Args:
        dtype: the parameter's dtype, a floating-point one.
        recipe: a key of :data:`RECIPES`.
        state_format: overrides the default state format; not together with ``recipe``.
        weight_store: overrides the default store; not together with ``recipe``.

    Raises:
        TypeError: ``dtype`` is not one that weights can have, or not one that the store rounds to.
        ValueError: an unknown name, or ``recipe`` beside one of its parts.
    """
    if dtype not in WEIGHT_DTYPES:
        raise TypeError(f"a weight of dtype {dtype} has no recipe; use float32, bfloat16, float16")
    if recipe is None:
        default = "bf16" if dtype is torch.bfloat16 else "fp32"
        return _pair(dtype, state_format or default, weight_store or "nearest")
    if state_format is not None or weight_store is not None:
        raise ValueError(
            f"recipe={recipe!r} already names a state format and a weight store; "
            f"give recipe, or state_format={state_format!r} and weight_store={weight_store!r}"
        )
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is unknown; use one of: {', '.join(RECIPES)}")
    return _pair(dtype, *RECIPES[recipe])


def resolve_group(
    dtype: torch.dtype, group: Mapping, defaults: Mapping[str, str | None]
) -> tuple[StateFormat, WeightStore]:
    """Return the formats of a weight of ``dtype`` in a param group.

    A group's ``recipe`` replaces the optimizer's formats; its ``state_format`` or ``weight_store`` only that part.

    Args:
        dtype: the parameter's.
        group: may have the keys ``recipe``, ``state_format`` and ``weight_store``.
        defaults: these keys for the groups that have none.

    Raises:
        As :func:`resolve_recipe`.
    """
    own = {key: group[key] for key in FORMAT_KEYS if group.get(key) is not None}
    if not own or "recipe" in own:
        return resolve_recipe(dtype, **(own or defaults))
    state, store = resolve_recipe(dtype, **defaults)
    return resolve_recipe(dtype, **{"state_format": state.name, "weight_store": store.name, **own})


def _pair(dtype: torch.dtype, state: str, store: str) -> tuple[StateFormat, WeightStore]:
    pair = state_format(state), weight_store(store)
    if pair[1].stochastic and dtype is torch.float16:
        raise TypeError(f"weight_store={store!r} rounds to bfloat16, not to float16; use bfloat16, or 'master'")
    return pair
