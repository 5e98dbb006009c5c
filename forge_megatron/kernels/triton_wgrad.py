"""The fused weight gradient and optimizer step: the portable Triton kernels.

A program forms one tile of ``G = dY^T X`` in fp32 registers (FORGE, algorithm 1) and hands it to
one of three epilogues: step it, take its norm, or write it to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.code import as_bytes
from . import triton_lookup
from .grouped import first_of
from .merge import MAX_SEGMENTS
from .norms import add_up
from .slot import Slot, shared_strides
from .tiles import Tile
from .triton_epilogue import step_coordinates
from .triton_language import (
    compiled_codes,
    compiled_update,
    load_scalars,
    round_to,
)
from .triton_launch import Launch
from .triton_noise import tile_bits
from .triton_tile import (
    add_lookups,
    channel_factors,
    column_parts,
    gradient_tile,
    in_range,
    kinds_of,
    load_factors,
    locate,
    of_expert,
    tile_position,
)

#: Token counts of the segments of one launch. They change from batch to batch and must not compile the
#: kernel anew, as they would inside a tuple, whose integers are always specialised.
TOKENS = [f"tokens_{segment}" for segment in range(MAX_SEGMENTS)]


@triton.jit(do_not_specialize=TOKENS)
def wgrad_step_kernel(
    dys,
    xs,
    strides,
    tokens_0,
    tokens_1,
    tokens_2,
    tokens_3,
    bounds,
    lookups,
    lookup_strides,
    accumulator,
    accumulator_strides,
    weight,
    weight_strides,
    weight_scale,
    states,
    scales,
    master,
    state_strides,
    scalars,
    noise,
    multiplier,
    channels,
    factors,
    partials,
    O,
    I,
    UPDATE: tl.constexpr,
    CODES: tl.constexpr,
    ON_SCRATCH: tl.constexpr,
    N_SCALARS: tl.constexpr,
    FACTORS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    tokens = (tokens_0, tokens_1, tokens_2, tokens_3)
    if bounds is not None:
        expert = tl.program_id(1).to(tl.int64)
        dys, xs, tokens = of_expert(dys, xs, strides, bounds, expert)
        if accumulator is not None:
            accumulator += expert * O * I
        weight += expert * O * I
        if master is not None:
            master += expert * O * I
        moved = ()
        for index in tl.static_range(len(states)):
            moved = moved + (states[index] + expert * O * I,)  # noqa: RUF005 - Triton has no unpacking
        states = moved
        moved = ()
        for index in tl.static_range(len(scales)):
            moved = moved + (scales[index] + expert * O * tl.cdiv(I, 64),)  # noqa: RUF005 - Triton has no unpacking
        scales = moved
    row, column = tile_position(O, I, BLOCK_O, BLOCK_I, GROUP)
    tile = gradient_tile(dys, xs, tokens, strides, row, column, O, I, BLOCK_O, BLOCK_I, BLOCK_T, OFFSET, PRECISION)
    if lookups is not None:
        tile = add_lookups(tile, lookups, lookup_strides, row, column, O, I, BLOCK_O, BLOCK_I)
    h = load_scalars(scalars, N_SCALARS)
    sum_of_squares = 0.0
    tiles = column_parts(tile, PARTS)
    WIDTH: tl.constexpr = BLOCK_I // PARTS
    for part in tl.static_range(PARTS):
        g = tiles[part]
        first = column + part * WIDTH
        inside = in_range(row, first, O, I, BLOCK_O, WIDTH)
        if accumulator is not None:
            corner, offset = locate(row, first, accumulator_strides, BLOCK_O, WIDTH, OFFSET)
            added = tl.load(accumulator + corner + offset, mask=inside, other=0.0)
            g += added.to(tl.float32)
        if partials is not None:
            sum_of_squares += tl.sum(g * g)
        if multiplier is not None:
            g *= tl.load(multiplier)
        if channels is not None:
            g *= channel_factors(channels, row, first, O, I, BLOCK_O, WIDTH, BY_ROW)
        corner, offset = locate(row, first, weight_strides, BLOCK_O, WIDTH, OFFSET)
        weights = weight + corner + offset
        corner, offset = locate(row, first, state_strides, BLOCK_O, WIDTH, OFFSET)
        masters = None
        if master is not None:
            masters = master + corner + offset
        stored = ()
        for index in tl.static_range(len(states)):
            stored = stored + (states[index] + corner + offset,)  # noqa: RUF005 - Triton has no unpacking
        bits = None
        if noise is not None:
            # All experts are one tensor, of which the rows are numbered through.
            bits = tile_bits(noise, row + tl.program_id(1).to(tl.int64) * O, first, BLOCK_O, WIDTH, GROUPED)
        scaled = ()
        has_block = None
        weight_scaled = None
        if len(scales) > 0 or weight_scale is not None:
            rows = row + tl.arange(0, BLOCK_O)
            block = rows.to(tl.int64) * tl.cdiv(I, 64) + first // 64
            has_block = rows < O
            for index in tl.static_range(len(scales)):
                scaled = scaled + (scales[index] + block,)  # noqa: RUF005 - Triton has no unpacking
            if weight_scale is not None:
                weight_scaled = weight_scale + block
        known = load_factors(h, factors, row, first, O, I, FACTORS, BLOCK_O, WIDTH)
        step_coordinates(
            g,
            inside,
            weights,
            weight_scaled,
            masters,
            stored,
            scaled,
            has_block,
            known,
            bits,
            UPDATE,
            CODES,
            len(FACTORS) > 0,
            ON_SCRATCH,
        )
    if partials is not None:
        tl.store(partials + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), sum_of_squares)


@triton.jit(do_not_specialize=TOKENS)
def wgrad_norm_kernel(
    dys,
    xs,
    strides,
    tokens_0,
    tokens_1,
    tokens_2,
    tokens_3,
    bounds,
    lookups,
    lookup_strides,
    accumulator,
    accumulator_strides,
    sure,
    channels,
    partials,
    O,
    I,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    if sure is not None:  # noqa: SIM102 - a condition of the compiler's, and one of the device's
        if tl.load(sure) != 0:
            return
    tokens = (tokens_0, tokens_1, tokens_2, tokens_3)
    if bounds is not None:
        expert = tl.program_id(1).to(tl.int64)
        dys, xs, tokens = of_expert(dys, xs, strides, bounds, expert)
        if accumulator is not None:
            accumulator += expert * O * I
    row, column = tile_position(O, I, BLOCK_O, BLOCK_I, GROUP)
    g = gradient_tile(dys, xs, tokens, strides, row, column, O, I, BLOCK_O, BLOCK_I, BLOCK_T, OFFSET, PRECISION)
    if lookups is not None:
        g = add_lookups(g, lookups, lookup_strides, row, column, O, I, BLOCK_O, BLOCK_I)
    if accumulator is not None:
        inside = in_range(row, column, O, I, BLOCK_O, BLOCK_I)
        corner, offset = locate(row, column, accumulator_strides, BLOCK_O, BLOCK_I, OFFSET)
        g += tl.load(accumulator + corner + offset, mask=inside, other=0.0).to(tl.float32)
    if channels is not None:
        g *= channel_factors(channels, row, column, O, I, BLOCK_O, BLOCK_I, BY_ROW)
    tl.store(partials + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(g * g))


@triton.jit(do_not_specialize=TOKENS)
def wgrad_write_kernel(
    dys,
    xs,
    strides,
    tokens_0,
    tokens_1,
    tokens_2,
    tokens_3,
    bounds,
    lookups,
    lookup_strides,
    accumulator,
    accumulator_strides,
    out,
    out_strides,
    O,
    I,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tokens = (tokens_0, tokens_1, tokens_2, tokens_3)
    if bounds is not None:
        expert = tl.program_id(1).to(tl.int64)
        dys, xs, tokens = of_expert(dys, xs, strides, bounds, expert)
        if accumulator is not None:
            accumulator += expert * O * I
        out += expert * O * I
    row, column = tile_position(O, I, BLOCK_O, BLOCK_I, GROUP)
    g = gradient_tile(dys, xs, tokens, strides, row, column, O, I, BLOCK_O, BLOCK_I, BLOCK_T, OFFSET, PRECISION)
    if lookups is not None:
        g = add_lookups(g, lookups, lookup_strides, row, column, O, I, BLOCK_O, BLOCK_I)
    inside = in_range(row, column, O, I, BLOCK_O, BLOCK_I)
    if accumulator is not None:
        corner, offset = locate(row, column, accumulator_strides, BLOCK_O, BLOCK_I, OFFSET)
        g += tl.load(accumulator + corner + offset, mask=inside, other=0.0).to(tl.float32)
    corner, offset = locate(row, column, out_strides, BLOCK_O, BLOCK_I, OFFSET)
    tl.store(out + corner + offset, round_to(g, out.dtype.element_ty), mask=inside)


def wgrad_step(slot: Slot, segments, accumulator, multiplier, channels=None, tile: Tile | None = None) -> None:
    """Launch the step of one weight, or of all experts of a grouped one, on operands that the caller checked."""
    experts = slot.weight.shape[0] if slot.weight.dim() == 3 else None
    if experts is not None:
        slot, accumulator = first_of(slot), None if accumulator is None else accumulator[0]
    rows, columns = slot.weight.shape
    strides = shared_strides(slot)
    if channels is None and triton_lookup.takes(segments):
        triton_lookup.wgrad_step(slot, segments, accumulator, multiplier, strides)
        return
    written = [tensor for _, tensor in slot.tensors()]
    launch = Launch(
        segments,
        accumulator,
        rows,
        columns,
        written,
        noisy=slot.noise is not None,
        scaled=slot.is_scaled,
        experts=experts,
        tile=tile,
    )
    partials = None if slot.norm_sq is None else launch.partials(slot.weight.device)
    if launch.grid[0]:
        positional, constants = step_arguments(slot, launch, strides, multiplier, channels, (), partials)
        wgrad_step_kernel[launch.grid](*positional, **constants)
    if partials is not None:
        add_up(slot.norm_sq, partials, slot.late_norms)


def step_arguments(
    slot: Slot,
    launch: Launch,
    strides: tuple[int, ...],
    multiplier: Tensor | None,
    channels: Tensor | None,
    factors: Sequence[Tensor],
    partials: Tensor | None,
) -> tuple[tuple, dict]:
    """The step kernel's positional arguments, and its constants and options by name.

    Args:
        strides: :func:`shared_strides`.
        channels, factors: as :func:`fused.wgrad_step` and :func:`fused.measured_step` have them.
    """
    rows, columns = slot.weight.shape
    positional = (
        *launch.operands,
        as_bytes(slot.weight),
        slot.weight.stride(),
        slot.weight_scale,
        tuple(map(as_bytes, slot.states)),
        tuple(slot.scales),
        slot.master,
        strides,
        slot.scalars,
        None if slot.noise is None else slot.noise.words,
        multiplier,
        channels,
        tuple(factors),
        partials,
        rows,
        columns,
    )
    constants = {
        "UPDATE": compiled_update(slot.rule),
        "CODES": compiled_codes(slot),
        "ON_SCRATCH": slot.rule.on_scratch,
        "N_SCALARS": slot.rule.n_scalars,
        "FACTORS": kinds_of(factors),
        "GROUPED": slot.noise is not None and slot.noise.row_is_grouped,
        "PARTS": launch.parts,
        "BY_ROW": _by_row(channels),
        "maxnreg": launch.maxnreg,
        **launch.options,
    }
    return positional, constants


def wgrad_norm_sq(
    segments, out: Tensor, accumulator, shape, known: tuple[Tensor, Tensor] | None = None, channels=None
) -> None:
    """Launch the norm of one weight gradient, on operands that the caller checked.

    Args:
        known: what it is, 0-dim fp64, and whether that is sure, 0-dim bool; the kernel then has nothing to do.
        channels: fp32 ``[O, 1]`` or ``[1, I]``, which multiplies the gradient first.
    """
    *experts, rows, columns = shape
    accumulator = accumulator[0] if experts and accumulator is not None else accumulator
    launch = Launch(segments, accumulator, rows, columns, experts=experts[0] if experts else None)
    partials = launch.partials(out.device)
    if launch.grid[0]:
        sure = None if known is None else known[1].int()
        wgrad_norm_kernel[launch.grid](
            *launch.operands, sure, channels, partials, rows, columns, BY_ROW=_by_row(channels), **launch.options
        )
    if known is None:
        add_up(out, partials, None)
    else:
        norm_sq, sure = known
        out.data.copy_(torch.where(sure, norm_sq, partials.sum(dtype=torch.float64)))


def wgrad_write(segments, out: Tensor, accumulator: Tensor | None) -> None:
    """Launch the forming of one weight gradient in memory, on operands that the caller checked."""
    *experts, rows, columns = out.shape
    if experts:
        out, accumulator = out[0], None if accumulator is None else accumulator[0]
    launch = Launch(segments, accumulator, rows, columns, [out], experts=experts[0] if experts else None)
    if launch.grid[0]:
        wgrad_write_kernel[launch.grid](*launch.operands, out, out.stride(), rows, columns, **launch.options)


def _by_row(channels: Tensor | None) -> bool:
    return channels is not None and channels.shape[1] == 1
