"""8-bit codes whose steps grow with the value: squares for a signed state, fourth powers for the others.

A code ``k`` stands for ``±k²`` or ``k⁴`` of its block's scale, of which the block's largest magnitude is 127² or
255⁴, rounded to bfloat16: by at most 0.2 %, which changes no code of that magnitude. Steps near it are as fine as
those of a linear code (a second moment's are 1.6 %), and the smallest step is 2^-14 or 2^-32 of it, so that a
coordinate beside one a thousand times larger keeps its own step. Code 0 is zero, and a second moment above 0 has a
code above 0.

A level is the last whose lower limit, half a level below it, is at most the root of the value; limits are compared
as powers, whose rounding is the same everywhere. So the root itself may be an approximation, as long as it is off
by less than a millionth, and the CPU and the GPU have the same codes. Whole numbers are read from the bits of a
sum with 2^23: conversions take as long as eight other instructions.
"""

from __future__ import annotations

import torch

from ..rules.bind import torch_language as tl
from .code import Code


def part_of(largest, part):
    """Of a magnitude that is finite and from 2^-90 on, so that nothing here is subnormal."""
    bounded = tl.where(largest < 3.4028234663852886e38, largest, 3.4028234663852886e38)
    bounded = tl.where(bounded > 8.077935669463161e-28, bounded, 8.077935669463161e-28)
    return tl.where(largest > 0.0, tl.cast(tl.cast(bounded * part, tl.bfloat16), tl.float32), 0.0)


def scale_of_signed(largest):
    return part_of(largest, 1.0 / 16129.0)


def scale_of_nonnegative(largest):
    return part_of(largest, 1.0 / 4228250625.0)


def inverse(scale):
    return tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0))


def below(root):
    """2^23 and the level whose middle is at most half a level above ``root``, or the level below that one."""
    return root * 0.999999 + 8388608.0


def middle(level):
    """Half a level above what :func:`below` returned, exactly."""
    return level - 8388607.5


def encode_signed(x, scale):
    square = tl.abs(x) * inverse(scale)
    square = tl.where(square < 16129.0, square, 16129.0)
    limit = middle(below(tl.sqrt(square)))
    level = limit + tl.where(square >= limit * limit, 0.5, -0.5)
    sign = tl.cast(x, tl.uint32, bitcast=True) & 0x80000000
    level = tl.cast(tl.cast(level, tl.uint32, bitcast=True) | sign, tl.float32, bitcast=True)
    return tl.cast(tl.cast(level + 12582912.0, tl.uint32, bitcast=True), tl.int8)


def decode_signed(code, scale):
    level = tl.cast(tl.cast(code, tl.int32) + 0x4B400000, tl.float32, bitcast=True) - 12582912.0
    return level * tl.abs(level) * scale


def encode_nonnegative(x, scale):
    fourth = x * inverse(scale)
    fourth = tl.where(fourth < 4228250625.0, fourth, 4228250625.0)
    # What is not zero is at least at the lower limit of level 1.
    fourth = tl.where(fourth > 0.0625, fourth, 0.0625)
    level = below(tl.sqrt(tl.sqrt(fourth)))
    limit = middle(level)
    limit *= limit
    level += tl.where((fourth >= limit * limit) & (x > 0.0), 1.0, 0.0)
    return tl.cast(tl.cast(level, tl.uint32, bitcast=True), tl.uint8)


def decode_nonnegative(code, scale):
    level = tl.cast(code, tl.float32)
    square = level * level
    return square * square * scale


SIGNED = Code(torch.int8, encode_signed, decode_signed, scale_of_signed)
NONNEGATIVE = Code(torch.uint8, encode_nonnegative, decode_nonnegative, scale_of_nonnegative)
