"""e4m3 codes with a scale for each block, a power of two: a state as it is, a second moment's root.

The paper has one delayed scale a tensor. A scale a block costs 1/32 of a byte a coordinate and follows each
step: a block is never clipped by what another was a step ago, and none lies below e4m3's 2^-9 because
another is large. Powers of two cost no precision in a floating-point code. The root of a second moment has
twice the range and half the relative error. Values beyond the largest code become that code.

A weight that is stored so takes a scale under which it is nowhere beyond the largest code: its stochastic rounding is
then unbiased everywhere.
"""

from __future__ import annotations

import torch

from ..rules.bind import torch_language as tl
from .code import Code


def power_of_two(largest, to_next):
    """From 2^-54 to 2^119; ``to_next`` is what carries a mantissa that is too large into the exponent."""
    exponent = ((tl.cast(largest, tl.uint32, bitcast=True) + to_next) >> 23) & 0x1FF
    exponent = tl.where(exponent > 81, exponent, 81)
    exponent = tl.where(exponent < 254, exponent, 254) - 8
    scale = tl.cast(tl.cast(exponent << 23, tl.uint32), tl.float32, bitcast=True)
    return tl.where(largest > 0.0, scale, 0.0)


def scale_of(largest):
    """The smallest power of two with which the largest magnitude is at most 448, rounded."""
    return power_of_two(largest, 0x17FFFF)


def scale_of_weight(largest):
    """The smallest power of two with which the largest magnitude is at most 448."""
    return power_of_two(largest, 0x1FFFFF)


def scale_of_root(largest):
    return scale_of(tl.sqrt_rn(largest))


def in_scale(x, scale):
    """``x`` in units of its scale, at most 448 in magnitude."""
    ratio = x * tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0))
    ratio = tl.where(ratio < 448.0, ratio, 448.0)
    return tl.where(ratio > -448.0, ratio, -448.0)


def to_byte(x):
    return tl.cast(tl.cast(x, tl.float8e4nv), tl.uint8, bitcast=True)


def from_byte(code):
    return tl.cast(tl.cast(code, tl.float8e4nv, bitcast=True), tl.float32)


def encode_signed(x, scale):
    return to_byte(in_scale(x, scale))


def decode_signed(code, scale):
    return from_byte(code) * scale


def encode_stochastically(x, scale, bits):
    """One of the two neighbours of ``x``, the nearer one more often; what is a code's value stays.

    Args:
        bits: uint32, of which the upper 20 are used: as many as the rounding drops.
    """
    ratio = in_scale(x, scale)
    magnitude = tl.abs(ratio)
    # Below 2^-6 codes are 2^-9 apart, as numbers from there to 2^-5 are.
    shift = tl.where(magnitude < 0.015625, 0.015625, 0.0)
    moved = (tl.cast(magnitude + shift, tl.uint32, bitcast=True) + (bits >> 12)) & 0x7FF00000
    rounded = tl.cast(tl.cast(moved, tl.uint32), tl.float32, bitcast=True) - shift
    return to_byte(tl.where(ratio < 0.0, -rounded, rounded))


def encode_nonnegative(x, scale):
    root = in_scale(tl.sqrt_rn(x), scale)
    # What is not zero is at least the smallest code.
    return to_byte(tl.where((x > 0.0) & (root < 0.001953125), 0.001953125, root))


def decode_nonnegative(code, scale):
    root = from_byte(code) * scale
    return root * root


SIGNED = Code(torch.float8_e4m3fn, encode_signed, decode_signed, scale_of)
NONNEGATIVE = Code(torch.float8_e4m3fn, encode_nonnegative, decode_nonnegative, scale_of_root)
WEIGHT = Code(torch.float8_e4m3fn, encode_signed, decode_signed, scale_of_weight)
