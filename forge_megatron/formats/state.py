"""How an optimizer state lies in memory between two steps.

A format is a pair of ``tl`` functions, bound to a language as a rule is
(:func:`forge_megatron.rules.bind`): ``decode`` turns what was loaded into an fp32 tile, ``encode``
turns an fp32 tile into what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..rules.bind import torch_language as tl


@dataclass(frozen=True)
class StateFormat:
    """A state format.

    Attributes:
        name: its name in recipes and in ``state_format=``.
        dtype: dtype of the stored tensor, which has the weight's shape.
        encode: fp32 tile to stored tile, rounding to nearest even.
        decode: stored tile to fp32 tile, exact.
    """

    name: str
    dtype: torch.dtype
    encode: Callable
    decode: Callable

    def allocate(self, weight: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Return a state full of ``value`` for ``weight``, with its shape, strides and device."""
        return torch.full_like(weight, value, dtype=self.dtype, requires_grad=False)


def to_fp32(x):
    return tl.cast(x, tl.float32)


def to_bf16(x):
    return tl.cast(x, tl.bfloat16)


_FORMATS = {
    "fp32": StateFormat("fp32", torch.float32, to_fp32, to_fp32),
    "bf16": StateFormat("bf16", torch.bfloat16, to_bf16, to_fp32),
}
_NOT_BUILT = ("int8", "fp8")


def state_format(name: str) -> StateFormat:
    """Return the state format called ``name``.

    Raises:
        NotImplementedError: it is specified and not built.
        ValueError: there is no such format.
    """
    if name in _FORMATS:
        return _FORMATS[name]
    choices = ", ".join(_FORMATS)
    if name in _NOT_BUILT:
        raise NotImplementedError(f"state_format={name!r} is not built; use one of: {choices}")
    raise ValueError(f"state_format={name!r} is unknown; use one of: {choices}")


def state_format_of(state: torch.Tensor) -> StateFormat:
    """Return the format of a stored state. Raises ``TypeError`` if its dtype is none's."""
    for candidate in _FORMATS.values():
        if candidate.dtype is state.dtype:
            return candidate
    raise TypeError(
        f"an optimizer state of dtype {state.dtype} has no format; "
        f"convert it to one of: {', '.join(str(f.dtype) for f in _FORMATS.values())}"
    )
