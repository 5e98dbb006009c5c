"""Layer specs with other classes in them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

#: Multi-latent attention compares these with the classes that it knows; prepare() converts what it has built.
_COMPARED = ("linear_q_down_proj", "linear_kv_down_proj")


def rewrite(spec: Any, replacements: Mapping[Any, type]) -> Any:
    """A copy of a spec with other classes in it.

    Args:
        spec: a ModuleSpec, a submodules dataclass, a ``functools.partial`` (megatron-core 0.19), a list of
            these, or a class.
        replacements: class to class.
    """
    if isinstance(spec, type):
        return replacements.get(spec, spec)
    if isinstance(spec, functools.partial):
        keywords = {name: rewrite(value, replacements) for name, value in spec.keywords.items()}
        return functools.partial(rewrite(spec.func, replacements), *spec.args, **keywords)
    if isinstance(spec, (list, tuple)):
        return type(spec)(rewrite(member, replacements) for member in spec)
    if dataclasses.is_dataclass(spec):
        rewritten = copy.copy(spec)
        for field in dataclasses.fields(spec):
            if field.name in _COMPARED:
                continue
            setattr(rewritten, field.name, rewrite(getattr(spec, field.name), replacements))
        return rewritten
    return spec
