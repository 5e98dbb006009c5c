"""Launch configurations of the weight-gradient kernel, by shape and dtype.

Fixed, so that a step neither tunes on live weights nor differs between replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """One launch configuration.

    Attributes:
        block_o, block_i: the tile of the gradient that one program forms.
        block_t: tokens of one step of the reduction.
        group: tiles of consecutive rows that run together and share their X in L2.
        parts: column parts in which the epilogue walks the tile: only one part's weight, states
            and master are in registers beside the gradient.
        num_warps, num_stages, maxnreg: Triton's.
    """

    block_o: int
    block_i: int
    block_t: int
    group: int
    parts: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


#: 128 registers a thread let two programs share a processor: one multiplies while the other steps.
LARGE = Tile(128, 128, 64, group=8, parts=8, num_warps=8, num_stages=3, maxnreg=128)
SMALL = Tile(64, 64, 64, group=8, parts=2, num_warps=4, num_stages=4)
LARGE_FP32 = Tile(128, 64, 16, group=8, parts=4, num_warps=8, num_stages=3)
SMALL_FP32 = Tile(64, 64, 16, group=8, parts=2, num_warps=4, num_stages=3)

#: Where rows cannot be read 16 bytes at a time, element-wise addresses take the registers.
UNALIGNED = Tile(64, 64, 32, group=8, parts=4, num_warps=8, num_stages=2)
UNALIGNED_FP32 = Tile(64, 64, 16, group=8, parts=4, num_warps=8, num_stages=2)

#: Below this many large tiles, small ones fill the GPU better (an H200 has 132 processors).
FEW_TILES = 132


def choose_tile(rows: int, columns: int, *, fp32: bool, aligned: bool, product: bool = True) -> Tile:
    """Return the tile for an ``[rows, columns]`` gradient.

    Args:
        rows, columns: of the weight.
        fp32: its operands multiply in fp32 (or TF32).
        aligned: every row of every operand begins on a 16-byte boundary.
        product: it is a product of matrices; without one nothing is shared by the rows of a large tile, and
            several programs with small ones hide each other's loads.
    """
    if not aligned:
        return UNALIGNED_FP32 if fp32 else UNALIGNED
    large, small = (LARGE_FP32, SMALL_FP32) if fp32 else (LARGE, SMALL)
    tiles = -(-rows // large.block_o) * -(-columns // large.block_i)
    return small if tiles < FEW_TILES or not product else large


def in_blocks(tile: Tile, *, aligned: bool) -> Tile:
    """``tile`` for states that are stored in blocks of 64: it is that wide, and holds more for a coordinate."""
    return replace(tile, block_o=64 if aligned else 32, block_i=64, parts=1, num_warps=8, maxnreg=None)
