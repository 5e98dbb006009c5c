"""The norms of many weight gradients, in five launches for all of them.

Where the tokens are fewer than the features, ``‖dYᵀ X‖²`` comes from the tokens' Gram matrices (:mod:`.gram` has the
mathematics and the estimate of its error), of which only one triangle of tiles is formed. Where they are not, or the
estimate is not sure, the gradient is formed tile by tile; which, the GPU decides. No sum depends on the order in which
programs run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import is_blocked
from .cost import formed_norm_us, grams_norm_us
from .gram import ROUNDINGS, SMALLEST, TOLERANCE
from .lookups import is_lookup
from .slot import Segment
from .tiles import LARGE
from .triton_gram import COLUMNS, SEGMENT_COLUMNS, features_of, gram_kernel, judge_kernel, squares_kernel
from .triton_language import TL_DTYPES, dot_fp32
from .triton_step import pointer
from .uploads import upload

#: Tokens of a tile of a Gram matrix.
TOKENS = 128

#: Tokens of one program that only squares them.
ROWS = 32

#: Features that a tensor core sums up in one go: it truncates as it sums, so that long sums come out low.
DEPTH = 128

#: Programs that form gradients: several for each processor of an H200.
PROGRAMS = 528

#: Segments of one weight that a table has room for.
MAX_SEGMENTS = 16

#: Rows of more elements have 64-bit offsets inside a tile.
MAX_STRIDE = 1 << 23

LANES = 1024

OUTPUTS = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["weights"])
def form_kernel(
    table,
    segments,
    weights,
    known,
    partials,
    DTYPE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Of each weight whose norm is not known, this program's part: the sum of squares of its tiles, fp32."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    before = program * 0
    for weight in range(weights):
        value = tl.load(known + weight)
        if value != value:
            row = table + weight * COLUMNS
            O = features_of(row, 5)
            I = features_of(row, 6)
            tiles_o = tl.cdiv(O, BLOCK_O)
            tiles = tiles_o * tl.cdiv(I, BLOCK_I)
            per_group = GROUP * tl.cdiv(I, BLOCK_I)
            total = 0.0
            # The programs that are done first with one weight begin the next.
            for tile in range((program + programs - before % programs) % programs, tiles, programs):
                top = (tile // per_group) * GROUP
                height = tl.minimum(tiles_o - top, GROUP)
                rows = (top + (tile % per_group) % height) * BLOCK_O + tl.arange(0, BLOCK_O)
                columns = (tile % per_group) // height * BLOCK_I + tl.arange(0, BLOCK_I)
                acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
                segment = segments + tl.load(row + 3) * SEGMENT_COLUMNS
                for _ in range(tl.load(row + 4).to(tl.int32)):
                    acc = add_segment(acc, segment, rows, columns, O, I, DTYPE, BLOCK_T)
                    segment += SEGMENT_COLUMNS
                total += tl.sum(tl.sum(acc * acc, 1), 0)
            tl.store(partials + weight * programs + program, total)
            before += tiles


@triton.jit
def add_segment(acc, segment, rows, columns, O, I, DTYPE: tl.constexpr, BLOCK_T: tl.constexpr):
    tokens = tl.load(segment + 2).to(tl.int32)
    dy_stride = tl.multiple_of(tl.load(segment + 3), 8).to(tl.int32)
    x_stride = tl.multiple_of(tl.load(segment + 4), 8).to(tl.int32)
    lanes = tl.arange(0, BLOCK_T)
    dy = pointer(segment, 0, DTYPE, True) + rows[:, None] + lanes[None, :] * dy_stride
    x = pointer(segment, 1, DTYPE, True) + lanes[:, None] * x_stride + columns[None, :]
    dy_step = tl.full((), BLOCK_T, tl.int64) * dy_stride
    x_step = tl.full((), BLOCK_T, tl.int64) * x_stride
    for start in range(0, tokens, BLOCK_T):
        inside = lanes < tokens - start
        left = tl.load(dy, mask=(rows < O)[:, None] & inside[None, :], other=0.0)
        right = tl.load(x, mask=inside[:, None] & (columns < I)[None, :], other=0.0)
        acc = dot_fp32(left, right, acc, "ieee")
        dy += dy_step
        x += x_step
    return acc


@triton.jit
def write_kernel(table, known, partials, PROGRAMS: tl.constexpr, OUT: tl.constexpr, LANES: tl.constexpr):
    weight = tl.program_id(0)
    value = tl.load(known + weight)
    if value != value:
        lanes = tl.arange(0, LANES)
        inside = lanes < PROGRAMS
        part = tl.load(partials + weight * PROGRAMS + lanes, mask=inside, other=0.0)
        value = tl.sum(part.to(tl.float64), 0)
    tl.store(pointer(table + weight * COLUMNS, 7, OUT, False), value.to(OUT))


def takes(segments: Sequence[Segment], shape: Sequence[int]) -> bool:
    """Whether the kernels can read these factors: 16 bits wide, of one dtype, rows of unit stride on 16 bytes."""
    if len(shape) != 2 or is_blocked(segments) or any(map(is_lookup, segments)):
        return False
    used = [segment for segment in segments if segment[0].shape[0]]
    tensors = [tensor for segment in used for tensor in segment]
    # One without tokens has a dtype too, and the first one's is that of the launch.
    dtypes = {tensor.dtype for segment in segments for tensor in segment}
    return (
        0 < len(used) <= MAX_SEGMENTS
        and all(extent % 8 == 0 for extent in shape)
        and len(dtypes) == 1
        and tensors[0].dtype in (torch.bfloat16, torch.float16)
        and all(
            tensor.stride(1) == 1
            and tensor.stride(0) % 8 == 0
            and tensor.stride(0) <= MAX_STRIDE
            and tensor.data_ptr() % 16 == 0
            for tensor in tensors
        )
    )


def wgrad_norms_sq(
    factors: Sequence[Sequence[Segment]], outs: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> None:
    """Launch the norms of weights of one device, one dtype and one dtype of ``outs``; :func:`takes` has taken each."""
    device, dtype = outs[0].device, factors[0][0][0].dtype
    used = [[segment for segment in segments if segment[0].shape[0]] for segments in factors]
    gram = [
        grams_norm_us(*shape, _tokens(segments)) < formed_norm_us(*shape, _tokens(segments))
        for segments, shape in zip(used, shapes, strict=True)
    ]
    # Weights without pairs of tiles come first, those with the most features next: their programs run the longest.
    order = sorted(range(len(outs)), key=lambda n: (gram[n], -sum(shapes[n])))
    rows, parts, pairs, tiles = [], [], 0, 0
    for n in order:
        own = sum(-(-dy.shape[0] // TOKENS) for dy, _ in used[n]) if gram[n] else 0
        rows.append((pairs, own, tiles, len(parts), len(used[n]), *shapes[n], outs[n].data_ptr()))
        parts += [(dy.data_ptr(), x.data_ptr(), dy.shape[0], dy.stride(0), x.stride(0)) for dy, x in used[n]]
        pairs, tiles = pairs + own * (own + 1) // 2, tiles + own
    table = upload(torch.tensor(rows, dtype=torch.int64), device)
    segments = upload(torch.tensor(parts, dtype=torch.int64), device)
    squares = torch.empty(2 * tiles * TOKENS, dtype=torch.float32, device=device)
    sums = torch.empty(3 * pairs, dtype=torch.float32, device=device)
    known = torch.empty(len(rows), dtype=torch.float64, device=device)
    partials = torch.empty(len(rows), PROGRAMS, dtype=torch.float32, device=device)
    common = {"DTYPE": TL_DTYPES[dtype]}
    if pairs:
        shape = {"TOKENS": TOKENS, "DEPTH": DEPTH}
        squares_kernel[(tiles, TOKENS // ROWS, 2)](
            table, segments, len(rows), squares, tiles, **common, **shape, ROWS=ROWS, num_warps=8
        )
        gram_kernel[(pairs,)](
            table, segments, len(rows), squares, tiles, sums, **common, **shape, num_warps=8, num_stages=3
        )
    judge_kernel[(len(rows),)](
        table,
        squares,
        tiles,
        sums,
        known,
        ROUNDING=ROUNDINGS * torch.finfo(torch.float32).eps,
        TOLERANCE=TOLERANCE,
        SMALLEST=SMALLEST,
        TOKENS=TOKENS,
        LANES=LANES,
    )
    form_kernel[(PROGRAMS,)](
        table,
        segments,
        len(rows),
        known,
        partials,
        **common,
        BLOCK_O=LARGE.block_o,
        BLOCK_I=LARGE.block_i,
        BLOCK_T=LARGE.block_t,
        GROUP=LARGE.group,
        num_warps=LARGE.num_warps,
        num_stages=LARGE.num_stages,
    )
    write_kernel[(len(rows),)](table, known, partials, PROGRAMS=PROGRAMS, OUT=OUTPUTS[outs[0].dtype], LANES=LANES)


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(dy.shape[0] for dy, _ in segments)
