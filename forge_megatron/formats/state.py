"""The formats that an optimizer's states can have between two steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..rules.bind import torch_language as tl
from . import fp8, int8
from .code import SCALE_DTYPE, Code, scale_shape


@dataclass(frozen=True)
class StateFormat:
    """A state format.

    Attributes:
        name: its name in recipes and in ``state_format=``.
        signed: the code of a state that can have any sign.
        nonnegative: of one that a rule says is never below 0.
    """

    name: str
    signed: Code
    nonnegative: Code

    @property
    def is_scaled(self) -> bool:
        """Whether blocks of coordinates share a scale."""
        return self.signed.scale is not None

    def code(self, *, nonnegative: bool) -> Code:
        return self.nonnegative if nonnegative else self.signed

    def allocate(
        self, name: str, weight: Tensor, value: float = 0.0, *, nonnegative: bool = False
    ) -> dict[str, Tensor]:
        """Return a state full of ``value`` for ``weight``, with its shape, strides and device, and its scales.

        Returns:
            ``{name: codes}``, and with scales also ``{scale_name(name): bfloat16 [..., blocks]}``.
        """
        code = self.code(nonnegative=nonnegative)
        stored = torch.empty_like(weight, dtype=code.dtype, requires_grad=False)
        if not self.is_scaled:
            return {name: stored.fill_(value)}
        scale = torch.zeros(scale_shape(weight.shape), dtype=SCALE_DTYPE, device=weight.device)
        if value == 0.0:
            return {name: stored.zero_(), scale_name(name): scale}
        codes, scales = code.store(torch.full(weight.shape, value, device=weight.device))
        return {name: stored.copy_(codes), scale_name(name): scale.copy_(scales)}


def scale_name(state: str) -> str:
    """What the scales of a state are called beside it."""
    return f"{state}_scale"


def is_scale(name: str) -> bool:
    """Whether a state's name is that of another's scales."""
    return name.endswith("_scale")


def to_fp32(x, scale):
    return tl.cast(x, tl.float32)


def to_bf16(x, scale):
    return tl.cast(x, tl.bfloat16)


_FP32 = Code(torch.float32, to_fp32, to_fp32)
_BF16 = Code(torch.bfloat16, to_bf16, to_fp32)
_FORMATS = {
    "fp32": StateFormat("fp32", _FP32, _FP32),
    "bf16": StateFormat("bf16", _BF16, _BF16),
    "int8": StateFormat("int8", int8.SIGNED, int8.NONNEGATIVE),
    "fp8": StateFormat("fp8", fp8.SIGNED, fp8.NONNEGATIVE),
}
_BY_DTYPE = {code.dtype: fmt for fmt in _FORMATS.values() for code in (fmt.signed, fmt.nonnegative)}


def state_format(name: str) -> StateFormat:
    """Return the state format called ``name``. Raises ``ValueError`` if there is none."""
    if name not in _FORMATS:
        raise ValueError(f"state_format={name!r} is unknown; use one of: {', '.join(_FORMATS)}")
    return _FORMATS[name]


def state_format_of(state: Tensor) -> StateFormat:
    """Return the format of a stored state. Raises ``TypeError`` if its dtype is none's."""
    if state.dtype in _BY_DTYPE:
        return _BY_DTYPE[state.dtype]
    raise TypeError(
        f"an optimizer state of dtype {state.dtype} has no format; "
        f"convert it to one of: {', '.join(map(str, _BY_DTYPE))}"
    )
