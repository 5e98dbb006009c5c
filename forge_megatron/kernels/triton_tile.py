"""One tile of the weight gradient: where it lies, and its sum over the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .triton_language import INTERPRETED, dot_fp32, is_finite

#: Tokens of one step of a sum over lookups: a tile of an embedding has few, and their addresses take registers.
LOOKUPS = tl.constexpr(16)

#: What there is one number of: each row, each column, a whole matrix.
PER_ROW, PER_COLUMN, OF_ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def tile_position(O, I, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of this program's tile, in grouped order (shared X in L2)."""
    program = tl.program_id(0)
    tiles_o = tl.cdiv(O, BLOCK_O)
    per_group = GROUP * tl.cdiv(I, BLOCK_I)
    first = (program // per_group) * GROUP
    height = tl.minimum(tiles_o - first, GROUP)
    tile_o = first + (program % per_group) % height
    tile_i = (program % per_group) // height
    return tile_o * BLOCK_O, tile_i * BLOCK_I


@triton.jit
def of_expert(dys, xs, strides, bounds, expert):
    """One expert's part of segments whose tokens lie in the order of their experts.

    Args:
        bounds: int32 ``[E + 1]`` of each segment: where the tokens of each expert begin, and the last's end.
        expert: int64.

    Returns:
        Pointers to its first dY and X, and the number of its tokens, of each segment.
    """
    its_dys = ()
    its_xs = ()
    tokens = ()
    for segment in tl.static_range(len(dys)):
        dy_t, _, x_t, _ = strides[segment]
        begin = tl.load(bounds[segment] + expert)
        its_dys = its_dys + (dys[segment] + begin.to(tl.int64) * dy_t,)  # noqa: RUF005 - Triton has no unpacking
        its_xs = its_xs + (xs[segment] + begin.to(tl.int64) * x_t,)  # noqa: RUF005 - Triton has no unpacking
        tokens = tokens + (tl.load(bounds[segment] + expert + 1) - begin,)  # noqa: RUF005 - Triton has no unpacking
    return its_dys, its_xs, tokens


@triton.jit
def locate(row, column, strides, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, OFFSET: tl.constexpr):
    """Offsets of a tile of an ``[O, I]`` tensor: of its corner (int64), and from there (OFFSET)."""
    stride_o, stride_i = strides
    corner = row.to(tl.int64) * stride_o + column.to(tl.int64) * stride_i
    rows = tl.arange(0, BLOCK_O).to(OFFSET)[:, None]
    columns = tl.arange(0, BLOCK_I).to(OFFSET)[None, :]
    return corner, rows * stride_o + columns * stride_i


@triton.jit
def in_range(row, column, O, I, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    rows = row + tl.arange(0, BLOCK_O)
    columns = column + tl.arange(0, BLOCK_I)
    return (rows < O)[:, None] & (columns < I)[None, :]


@triton.jit
def gradient_tile(
    dys,
    xs,
    tokens,
    strides,
    row,
    column,
    O,
    I,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of ``sum over segments of dY^T X``; zero outside ``[O, I]``."""
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    row_inside = (row + tl.arange(0, BLOCK_O) < O)[:, None]
    column_inside = (column + tl.arange(0, BLOCK_I) < I)[None, :]
    for segment in tl.static_range(len(dys)):
        dy_t, dy_o, x_t, x_i = strides[segment]
        zero = row * 0
        dy_corner, dy_tile = locate(row, zero, (dy_o, dy_t), BLOCK_O, BLOCK_T, OFFSET)
        x_corner, x_tile = locate(zero, column, (x_t, x_i), BLOCK_T, BLOCK_I, OFFSET)
        dy = dys[segment] + dy_corner
        x = xs[segment] + x_corner
        block = tl.full((), BLOCK_T, tl.int64)
        for start in range(0, tokens[segment], BLOCK_T):
            inside = tl.arange(0, BLOCK_T) < tokens[segment] - start
            a = tl.load(dy + dy_tile, mask=row_inside & inside[None, :], other=0.0)
            b = tl.load(x + x_tile, mask=inside[:, None] & column_inside, other=0.0)
            acc = dot_fp32(a, b, acc, PRECISION)
            dy += block * dy_t
            x += block * x_t
    return acc


@triton.jit
def add_lookups(
    tile,
    lookups,
    strides,
    row,
    column,
    O,
    I,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """``tile + onehot(ids)^T dE`` over the tokens of the tile's rows, which are neighbours in the order of ids."""
    ids, order, values, starts = lookups
    stride_t, stride_i = strides
    here = row + tl.arange(0, BLOCK_O)
    columns = column + tl.arange(0, BLOCK_I)
    first = tl.load(starts + row // BLOCK_O)
    end = tl.load(starts + row // BLOCK_O + 1)
    for start in tl.range(first, end, LOOKUPS, num_stages=1):
        position = start + tl.arange(0, LOOKUPS)
        inside = position < end
        id = tl.load(ids + position, mask=inside, other=-1)
        token = tl.load(order + position, mask=inside, other=0)
        address = values + token[:, None] * stride_t + columns[None, :].to(tl.int64) * stride_i
        value = tl.load(address, mask=inside[:, None] & (columns < I)[None, :], other=0.0)
        chosen = (here[:, None] == id[None, :]).to(tl.float32)
        finite = is_finite(value.to(tl.float32))
        # Zero times infinity would spread over the rows of all other tokens.
        tile = dot_fp32(chosen if INTERPRETED else chosen.to(value.dtype), tl.where(finite, value, 0.0), tile, "ieee")
        broken = tl.where(finite, 0.0, 1.0)
        if tl.max(tl.max(broken, 1), 0) > 0.0:
            hit = tl.dot(chosen.to(tl.float16), broken.to(tl.float16))
            tile = tl.where(hit > 0.0, float("nan"), tile)
    return tile


@triton.jit
def channel_factors(channels, row, column, O, I, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BY_ROW: tl.constexpr):
    """What multiplies a tile: ``channels`` has one number a row, or one a column."""
    if BY_ROW:
        rows = row + tl.arange(0, BLOCK_O)
        return tl.load(channels + rows, mask=rows < O, other=0.0)[:, None]
    else:
        columns = column + tl.arange(0, BLOCK_I)
        return tl.load(channels + columns, mask=columns < I, other=0.0)[None, :]


def kinds_of(factors: Sequence[Tensor]) -> tuple[int, ...]:
    """What each factor of a matrix, ``[O, 1]``, ``[1, I]`` or ``[1, 1]``, has one number of."""
    kinds = PER_ROW.value, PER_COLUMN.value, OF_ALL.value
    return tuple(kinds[0 if f.shape[0] > 1 else 1 if f.shape[1] > 1 else 2] for f in factors)


@triton.jit
def load_factors(h, factors, row, column, O, I, KINDS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """``h`` and what each factor has for a tile."""
    for index in tl.static_range(len(KINDS)):
        if KINDS[index] == PER_ROW:
            rows = row + tl.arange(0, BLOCK_O)
            h = h + (tl.load(factors[index] + rows, mask=rows < O, other=1.0)[:, None],)  # noqa: RUF005 - Triton has no unpacking
        elif KINDS[index] == PER_COLUMN:
            columns = column + tl.arange(0, BLOCK_I)
            h = h + (tl.load(factors[index] + columns, mask=columns < I, other=1.0)[None, :],)  # noqa: RUF005
        else:
            h = h + (tl.load(factors[index]),)  # noqa: RUF005 - Triton has no unpacking
    return h


@triton.jit
def column_parts(tile, PARTS: tl.constexpr):
    """Cut a tile into ``PARTS`` (a power of two) tiles of adjacent columns, from left to right."""
    parts = (tile,)
    for _ in tl.static_range(PARTS.bit_length() - 1):
        halves = ()
        for index in tl.static_range(len(parts)):
            whole = parts[index]
            pair = whole.reshape(whole.shape[0], 2, whole.shape[1] // 2).permute(0, 2, 1)
            halves = halves + pair.split()
        parts = halves
    return parts
