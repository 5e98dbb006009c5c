"""The random bits of a coordinate: Philox4x32-10, counter-based, written once for Triton and torch.

Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (SC11). The counter is a
coordinate's place in the whole weight, so its bits depend on no tiling, sharding, backend or device.
"""

from __future__ import annotations

from ..rules.bind import torch_language as tl

#: Neighbouring columns that share one call of Philox: each takes one of its four words.
GROUP = 4


def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of a 128-bit counter under a 64-bit key, each a uint32 below 2^32."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = (c0 * 0xD2511F53) & 0xFFFFFFFF
        low1 = (c2 * 0xCD9E8D57) & 0xFFFFFFFF
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def counter_words(value):
    """Return the low and the high word of an int64."""
    return tl.cast(value & 0xFFFFFFFF, tl.uint32), tl.cast((value >> 32) & 0xFFFFFFFF, tl.uint32)


def round_stochastically(x, bits):
    """Round fp32 ``x`` to one of its two bf16 neighbours, the nearer one more often.

    A bf16 value stays; what is finite stays finite; infinities and NaNs stay what they are.

    Args:
        bits: uint32, of which the upper 16 are used: as many as the rounding drops.
    """
    word = tl.cast(x, tl.uint32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    moved = magnitude + (bits >> 16)
    moved = tl.where(moved < 0x7F800000, moved, 0x7F7FFFFF)
    kept = tl.where(magnitude > 0x7F800000, 0x7FC00000, magnitude)
    rounded = (word & 0x80000000) | tl.where(magnitude < 0x7F800000, moved, kept)
    return tl.cast(tl.cast(rounded >> 16, tl.uint16), tl.bfloat16, bitcast=True)
