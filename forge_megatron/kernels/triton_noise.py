"""The random bits of stochastic rounding inside the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from ..formats import fp8 as _fp8
from ..formats import noise as _noise
from ..formats import philox as _philox
from .triton_language import compiled

philox = compiled(_philox.philox)
counter_words = compiled(_philox.counter_words)
round_stochastically = compiled(_philox.round_stochastically)
word_of = compiled(_noise.word_of)
decode_weight = compiled(_fp8.decode_signed)
encode_weight = compiled(_fp8.encode_stochastically)
weight_scale_of = compiled(_fp8.scale_of_weight)


@triton.jit
def called(key, row, group):
    group_low, group_high = counter_words(group)
    row_low, row_high = counter_words(row)
    key_low, key_high = counter_words(key)
    return philox(group_low, group_high, row_low, row_high, key_low, key_high)


@triton.jit
def interleaved(words):
    """Four ``[..., N]`` tensors as one ``[..., N, 2, 2]``: the words of a group side by side."""
    return tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))


@triton.jit
def row_in_whole(noise, row):
    return row + tl.load(noise + 1) + tl.where(row >= tl.load(noise + 3), tl.load(noise + 4), 0)


@triton.jit
def tile_bits(noise, row, column, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUPED: tl.constexpr):
    """Bits ``[BLOCK_O, BLOCK_I]`` of a tile of an ``[O, I]`` weight whose corner is ``(row, column)``.

    Args:
        noise: the row of a ``Noise``.
        GROUPED: ``column`` is a multiple of 4, in this part and in the whole: one Philox for four.
    """
    key = tl.load(noise)
    rows = row_in_whole(noise, (row + tl.arange(0, BLOCK_O)).to(tl.int64))[:, None]
    first = column + tl.load(noise + 2)
    if GROUPED:
        groups = (first // 4 + tl.arange(0, BLOCK_I // 4))[None, :]
        return interleaved(called(key, rows, groups)).reshape(BLOCK_O, BLOCK_I)
    else:
        columns = (first + tl.arange(0, BLOCK_I))[None, :]
        return word_of(called(key, rows, columns >> 2), columns)


@triton.jit
def bits_at(noise, offset, GROUPED: tl.constexpr):
    """Bits of the coordinates at ``offset`` along the rows.

    Args:
        offset: int64; with GROUPED those of each fourth coordinate, and the bits have two dimensions
            of size 2 more, for the four of a group.
    """
    position = offset + tl.load(noise + 5)
    width = tl.load(noise + 6)
    row = position // width
    column = position - row * width + tl.load(noise + 2)
    words = called(tl.load(noise), row_in_whole(noise, row), column >> 2)
    if GROUPED:
        return interleaved(words)
    else:
        return word_of(words, column)


@triton.jit
def flat_bits(noise, first, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """Bits ``[BLOCK]`` of coordinates side by side, from ``first`` (int64) on."""
    if GROUPED:
        return bits_at(noise, first + tl.arange(0, BLOCK // 4) * 4, GROUPED).reshape(BLOCK)
    else:
        return bits_at(noise, first + tl.arange(0, BLOCK), GROUPED)


@triton.jit
def block_bits(noise, first, BLOCKS: tl.constexpr, GROUPED: tl.constexpr):
    """Bits ``[BLOCKS, 64]`` of blocks that begin at ``first`` (int64)."""
    if GROUPED:
        return bits_at(noise, first[:, None] + (tl.arange(0, 16) * 4)[None, :], GROUPED).reshape(BLOCKS, 64)
    else:
        return bits_at(noise, first[:, None] + tl.arange(0, 64)[None, :], GROUPED)
