"""``triton.language`` as rules, formats and kernels use it, compiled or interpreted.

Triton's interpreter keeps bf16 as raw 16-bit integers: its products are garbage and its rounding
truncates; its e4m3 is no better. These are done by hand here where the interpreter runs, and nowhere else.
"""

from __future__ import annotations

import functools
from types import FunctionType

import torch
import triton
import triton.language as tl

from ..rules import Rule, bind
from . import triton_device
from .slot import Slot

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

TL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}


def e4m3_of(x):
    """fp32 ``x`` of at most 448 rounded to e4m3, to nearest even, in the interpreter."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^23 rounds to a whole number, here of 2^-9.
    subnormal = tl.abs(x) * 512.0 + 8388608.0 - 8388608.0
    code = tl.where(magnitude < 0x3C800000, subnormal.to(tl.uint32), normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


def widened_e4m3(x):
    """e4m3 ``x`` in fp32, in the interpreter."""
    code = x.to(tl.uint8, bitcast=True).to(tl.uint32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round fp32 ``x`` to ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def dot_fp32(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in fp32. Operands of two dtypes meet in fp32, which holds both."""
    if a.dtype != b.dtype or (INTERPRETED and a.dtype == tl.bfloat16):
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def is_finite(x):
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def load_scalars(pointer, COUNT: tl.constexpr):
    """Load ``COUNT`` hyperparameters as the tuple ``h`` that a rule's update takes."""
    h = ()
    for index in tl.static_range(COUNT):
        h = h + (tl.load(pointer + index),)  # noqa: RUF005 - Triton has no unpacking
    return h


class _InterpretedLanguage:
    """``triton.language`` with a ``cast`` that rounds bf16; looked up late, as it is patched."""

    @staticmethod
    def cast(x, dtype, bitcast=False):
        if bitcast:
            return x.to(dtype, bitcast=True)
        if dtype == tl.float8e4nv:
            return e4m3_of(x)
        return widened_e4m3(x) if x.dtype == tl.float8e4nv else round_to(x, dtype)

    def __getattr__(self, name: str):
        return getattr(tl, name)


@functools.cache
def compiled(function: FunctionType):
    """Return a function of rules or formats, whose ``tl`` is torch, as a Triton function."""
    if INTERPRETED.value:
        # A kernel that is interpreted is Python, and so is what it calls.
        return bind(function, _InterpretedLanguage())
    return bind(function, triton_device, triton.jit)


def compiled_update(rule: Rule):
    """Return ``rule.update`` as a Triton function."""
    return compiled(rule.update)


class Named(tuple):
    """A constant of a kernel that holds Triton functions. A plain tuple's part in the name under which Triton keeps
    the compiled kernel on disk has their names alone: a kernel of what they were before would be found there."""

    @property
    def cache_key(self) -> str:
        return str([getattr(each, "cache_key", each) for each in self])


def compiled_codes(slot: Slot) -> Named:
    """Return ``(decode, encode)``, and ``scale`` where there is one, of each state as Triton functions."""
    if "codes" not in slot.memo:
        functions = ((code.decode, code.encode, *([code.scale] if code.scale else [])) for code in slot.codes())
        slot.memo["codes"] = Named(Named(map(compiled, each)) for each in functions)
    return slot.memo["codes"]
