"""8-bit codes whose steps grow with the value: squares for a signed state, fourth powers for the others.

A code ``k`` stands for ``±(|k| / 127)²`` or ``(k / 255)⁴`` of the largest magnitude of its block. Steps near
that magnitude are as fine as those of a linear code (a second moment's are 1.6 %), and the smallest step is
2^-14 or 2^-32 of it, so that a coordinate beside one a thousand times larger keeps its own step. Roots and
products round alike everywhere: the same codes on the CPU and the GPU. Code 0 is zero, and a second moment
above 0 has a code above 0.
"""

from __future__ import annotations

import torch

from ..rules.bind import torch_language as tl
from .code import Code


def scale_of(largest):
    """The largest magnitude itself; from 2^-90 on, so that nothing here is subnormal, and finite."""
    bounded = tl.where(largest < 3.4028234663852886e38, largest, 3.4028234663852886e38)
    return tl.where(largest > 0.0, tl.where(bounded > 8.077935669463161e-28, bounded, 8.077935669463161e-28), 0.0)


def fraction(x, scale):
    """``|x|`` in units of its block's largest, at most 1."""
    ratio = tl.abs(x) * tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0))
    return tl.where(ratio < 1.0, ratio, 1.0)


def encode_signed(x, scale):
    root = tl.sqrt_rn(fraction(x, scale))
    # A product of 127 that is rounded once, also where a compiler fuses it with the sum after it.
    level = tl.floor(root * 128.0 - root + 0.5)
    return tl.cast(tl.where(x < 0.0, -level, level), tl.int8)


def decode_signed(code, scale):
    level = tl.cast(code, tl.float32) * (1.0 / 127.0)
    return level * tl.abs(level) * scale


def encode_nonnegative(x, scale):
    root = tl.sqrt_rn(tl.sqrt_rn(fraction(x, scale)))
    level = tl.floor(root * 256.0 - root + 0.5)
    return tl.cast(tl.where((x > 0.0) & (level < 1.0), 1.0, level), tl.uint8)


def decode_nonnegative(code, scale):
    level = tl.cast(code, tl.float32) * (1.0 / 255.0)
    square = level * level
    return square * square * scale


SIGNED = Code(torch.int8, encode_signed, decode_signed, scale_of)
NONNEGATIVE = Code(torch.uint8, encode_nonnegative, decode_nonnegative, scale_of)
