"""Gram matrices of the tokens of many weights at once: the kernels of :mod:`.triton_norms` that form no gradient.

Of each matrix one triangle of tiles is formed. A table of weights and one of segments say where dY and X are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_language import dot_fp32
from .triton_step import pointer

#: Columns of a weight's row: first pair of tiles, number of tiles, first tile, first segment, segments, O, I, output.
COLUMNS = tl.constexpr(8)
#: Columns of a segment's row: dY, X, tokens, stride of dY, stride of X.
SEGMENT_COLUMNS = tl.constexpr(5)


@triton.jit
def last_row(table, column, value, rows):
    """The last row whose ``column`` is at most ``value``."""
    low = rows * 0
    high = rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = tl.load(table + middle * COLUMNS + column) <= value
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return table + low * COLUMNS


@triton.jit
def features_of(row, column):
    """O or I: a multiple of 8, so that the mask of 16 bytes is one."""
    return tl.multiple_of(tl.load(row + column).to(tl.int32), 8)


@triton.jit
def tile_of_tokens(row, segments, index, DTYPE: tl.constexpr, TOKENS: tl.constexpr):
    """Of a weight's tile ``index``: its dY and X, the rows that it has, and their strides."""
    segment = segments + tl.load(row + 3) * SEGMENT_COLUMNS
    tiles = tl.cdiv(tl.load(segment + 2).to(tl.int32), TOKENS)
    while index >= tiles:
        index -= tiles
        segment += SEGMENT_COLUMNS
        tiles = tl.cdiv(tl.load(segment + 2).to(tl.int32), TOKENS)
    dy_stride = tl.multiple_of(tl.load(segment + 3), 8)
    x_stride = tl.multiple_of(tl.load(segment + 4), 8)
    dy = pointer(segment, 0, DTYPE, True) + index * TOKENS * dy_stride
    x = pointer(segment, 1, DTYPE, True) + index * TOKENS * x_stride
    return dy, x, tl.load(segment + 2).to(tl.int32) - index * TOKENS, dy_stride.to(tl.int32), x_stride.to(tl.int32)


@triton.jit(do_not_specialize=["weights", "tiles"])
def squares_kernel(
    table,
    segments,
    weights,
    squares,
    tiles,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``‖dY_t‖²`` and ``‖X_t‖²`` of every token, ``[2, tiles, TOKENS]``; zero where a tile has no token."""
    tile = tl.program_id(0)
    begin = tl.program_id(1) * ROWS
    row = last_row(table, 2, tile, weights)
    index = tile - tl.load(row + 2).to(tl.int32)
    dy, x, rows, dy_stride, x_stride = tile_of_tokens(row, segments, index, DTYPE, TOKENS)
    start = dy
    stride = dy_stride
    features = features_of(row, 5)
    if tl.program_id(2) == 1:
        start = x
        stride = x_stride
        features = features_of(row, 6)
    lanes = begin + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    address = start + lanes[:, None] * stride + depth[None, :]
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for first in range(0, features, DEPTH):
        inside = (lanes < rows)[:, None] & (depth < features - first)[None, :]
        value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        total += value * value
        address += DEPTH
    place = (tl.program_id(2) * tiles + tile).to(tl.int64) * TOKENS + lanes
    tl.store(squares + place, tl.sum(total, 1))


@triton.jit
def inner_products(a, b, a_rows, b_rows, a_stride, b_stride, features, TOKENS: tl.constexpr, DEPTH: tl.constexpr):
    """``A Bᵀ`` of two tiles of tokens, fp32 ``[TOKENS, TOKENS]``."""
    lanes = tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    a += lanes[:, None] * a_stride + depth[None, :]
    b += lanes[None, :] * b_stride + depth[:, None]
    total = tl.zeros((TOKENS, TOKENS), tl.float32)
    for first in range(0, features, DEPTH):
        inside = depth < features - first
        left = tl.load(a, mask=(lanes < a_rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b, mask=inside[:, None] & (lanes < b_rows)[None, :], other=0.0)
        product = dot_fp32(left, right, tl.zeros((TOKENS, TOKENS), tl.float32), "ieee")
        # A sum of the two would be folded into one accumulator.
        total = tl.fma(product, 1.0, total)
        a += DEPTH
        b += DEPTH
    return total


@triton.jit
def largest(squares, tiles, TOKENS: tl.constexpr):
    found = tl.zeros((TOKENS,), tl.float32)
    for tile in range(tiles):
        value = tl.load(squares + tile * TOKENS + tl.arange(0, TOKENS))
        # A NaN that is left out would leave the others sure.
        found = tl.where((value > found) | (value != value), value, found)
    broken = tl.max(tl.where(found != found, 1.0, 0.0), 0)
    return tl.where(broken > 0.0, float("nan"), tl.max(found, 0))


@triton.jit(do_not_specialize=["weights", "tiles"])
def gram_kernel(
    table,
    segments,
    weights,
    squares,
    tiles,
    sums,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one pair of a weight's tiles: the sums of the terms, of their sizes, and of the squares of their roundings.

    dY and X are divided by their longest tokens, so that squares of squares stay fp32 numbers.
    """
    pair = tl.program_id(0)
    row = last_row(table, 0, pair, weights)
    local = pair - tl.load(row).to(tl.int32)
    i = ((tl.sqrt(8.0 * local.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > local, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= local, i + 1, i)
    j = local - i * (i + 1) // 2
    dy_i, x_i, rows_i, dy_stride_i, x_stride_i = tile_of_tokens(row, segments, i, DTYPE, TOKENS)
    dy_j, x_j, rows_j, dy_stride_j, x_stride_j = tile_of_tokens(row, segments, j, DTYPE, TOKENS)
    O = features_of(row, 5)
    I = features_of(row, 6)
    dys = inner_products(dy_i, dy_j, rows_i, rows_j, dy_stride_i, dy_stride_j, O, TOKENS, DEPTH)
    xs = inner_products(x_i, x_j, rows_i, rows_j, x_stride_i, x_stride_j, I, TOKENS, DEPTH)

    own = tl.load(row + 1).to(tl.int32)
    dy_squares = squares + tl.load(row + 2) * TOKENS
    x_squares = dy_squares + tiles.to(tl.int64) * TOKENS
    dy_scale = 1.0 / largest(dy_squares, own, TOKENS)
    x_scale = 1.0 / largest(x_squares, own, TOKENS)
    lanes = tl.arange(0, TOKENS)
    dys *= dy_scale
    xs *= x_scale
    terms = dys * xs
    dy_own = tl.load(dy_squares + i * TOKENS + lanes) * dy_scale
    dy_other = tl.load(dy_squares + j * TOKENS + lanes) * dy_scale
    x_own = tl.load(x_squares + i * TOKENS + lanes) * x_scale
    x_other = tl.load(x_squares + j * TOKENS + lanes) * x_scale
    rounded = dy_own[:, None] * dy_other[None, :] * xs * xs + x_own[:, None] * x_other[None, :] * dys * dys
    # The other triangle is the same.
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(sums + pair * 3, tl.sum(tl.sum(terms, 1), 0) * times)
    tl.store(sums + pair * 3 + 1, tl.sum(tl.sum(tl.abs(terms), 1), 0) * times)
    tl.store(sums + pair * 3 + 2, tl.sum(tl.sum(rounded, 1), 0) * times)


@triton.jit(do_not_specialize=["tiles"])
def judge_kernel(
    table,
    squares,
    tiles,
    sums,
    known,
    ROUNDING: tl.constexpr,
    TOLERANCE: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """A weight's square from its Gram matrices, fp64; NaN where there are none, or it is not sure."""
    row = table + tl.program_id(0) * COLUMNS
    own = tl.load(row + 1).to(tl.int32)
    first = tl.load(row)
    count = own * (own + 1) // 2
    lanes = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    sizes = tl.zeros((LANES,), tl.float64)
    rounded = tl.zeros((LANES,), tl.float64)
    for start in range(0, count, LANES):
        inside = start + lanes < count
        place = sums + (first + start + lanes) * 3
        total += tl.load(place, mask=inside, other=0.0).to(tl.float64)
        sizes += tl.load(place + 1, mask=inside, other=0.0).to(tl.float64)
        rounded += tl.load(place + 2, mask=inside, other=0.0).to(tl.float64)
    value = tl.sum(total, 0)
    error = ROUNDING * (tl.sum(sizes, 0) + tl.sqrt(tl.sum(rounded, 0)))
    dy_squares = squares + tl.load(row + 2) * TOKENS
    dy_largest = largest(dy_squares, own, TOKENS)
    x_largest = largest(dy_squares + tiles.to(tl.int64) * TOKENS, own, TOKENS)
    sure = (own > 0) & (error <= TOLERANCE * value) & (dy_largest > SMALLEST) & (x_largest > SMALLEST)
    value = value * dy_largest.to(tl.float64) * x_largest.to(tl.float64)
    tl.store(known + tl.program_id(0), tl.where(sure, value, float("nan")))
