"""The step of an embedding: a row's gradient is the sum of dE over its own tokens, and most rows have none.

A program steps as few coordinates as one of the elementwise step, so that rows without a token cost what their weight
and states do. An embedding that is tied to a head has factors too, and is stepped by :mod:`triton_wgrad`.
"""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.code import as_bytes
from .lookups import Lookups, is_lookup
from .norms import add_up
from .slot import Segment, Slot
from .triton_epilogue import step_coordinates
from .triton_language import compiled_codes, compiled_update, load_scalars
from .triton_noise import tile_bits

#: Coordinates of a program, and of a warp: 8 a thread, which are loaded 16 bytes at a time.
COORDINATES = 2048
WARP_COORDINATES = 256

#: Tokens whose dE is loaded before the first is added: a row that a whole batch looks up waits this much less.
AT_ONCE = tl.constexpr(8)


def takes(segments: Sequence[Segment]) -> bool:
    """Whether the gradient is a sum of lookups and nothing else."""
    segments = [segment for segment in segments if segment[1].shape[0]]
    return bool(segments) and all(map(is_lookup, segments))


@triton.jit
def token_sum(lookups, strides, first, end, rows, columns, inside):
    """The sums of dE over each row's tokens, in their order, in fp32; ``first`` to ``end`` are those of all rows."""
    ids, order, values, _ = lookups
    stride_t, stride_i = strides
    total = tl.zeros(inside.shape, tl.float32)
    for start in tl.range(first, end, AT_ONCE, num_stages=1):
        loaded = ()
        for index in tl.static_range(AT_ONCE):
            position = start + index
            id = tl.load(ids + position, mask=position < end, other=-1)
            token = tl.load(order + position, mask=position < end, other=0)
            value = tl.load(values + token * stride_t + columns * stride_i, mask=inside & (rows == id), other=0.0)
            loaded = loaded + (value.to(tl.float32),)
        for index in tl.static_range(AT_ONCE):
            total += loaded[index]
    return total


@triton.jit
def lookup_step_kernel(
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
    partials,
    O,
    I,
    UPDATE: tl.constexpr,
    CODES: tl.constexpr,
    ON_SCRATCH: tl.constexpr,
    N_SCALARS: tl.constexpr,
    GROUPED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chunks = tl.cdiv(I, WIDTH)
    row = (tl.program_id(0) // chunks) * HEIGHT
    column = (tl.program_id(0) % chunks) * WIDTH
    # Lines of 64 columns, which are the blocks of a format: those of the first row, then those of the next.
    line = tl.arange(0, HEIGHT * WIDTH // 64)
    of_row = row.to(tl.int64) + line // (WIDTH // 64)
    first = column + line % (WIDTH // 64) * 64
    has_block = (of_row < O) & (first < I)
    rows = of_row[:, None]
    columns = first[:, None].to(tl.int64) + tl.arange(0, 64)[None, :]
    inside = (rows < O) & (columns < I)
    begin = tl.load(lookups[3] + row)
    end = tl.load(lookups[3] + tl.minimum(row + HEIGHT, O))
    g = token_sum(lookups, lookup_strides, begin, end, rows, columns, inside)
    if accumulator is not None:
        offset = rows * accumulator_strides[0] + columns * accumulator_strides[1]
        g += tl.load(accumulator + offset, mask=inside, other=0.0).to(tl.float32)
    if partials is not None:
        tl.store(partials + tl.program_id(0), tl.sum(g * g))
    if multiplier is not None:
        g *= tl.load(multiplier)
    weights = weight + rows * weight_strides[0] + columns * weight_strides[1]
    offset = rows * state_strides[0] + columns * state_strides[1]
    masters = None
    if master is not None:
        masters = master + offset
    stored = ()
    for index in tl.static_range(len(states)):
        stored = stored + (states[index] + offset,)
    bits = None
    if noise is not None:
        bits = tile_bits(noise, row, column, HEIGHT, WIDTH, GROUPED).reshape(HEIGHT * WIDTH // 64, 64)
    scaled = ()
    weight_scaled = None
    block = of_row * tl.cdiv(I, 64) + first // 64
    for index in tl.static_range(len(scales)):
        scaled = scaled + (scales[index] + block,)
    if weight_scale is not None:
        weight_scaled = weight_scale + block
    h = load_scalars(scalars, N_SCALARS)
    step_coordinates(
        g, inside, weights, weight_scaled, masters, stored, scaled, has_block, h, bits, UPDATE, CODES, False, ON_SCRATCH
    )


def wgrad_step(
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    state_strides: tuple[int, ...],
) -> None:
    """Launch the step of one weight from lookups alone, on operands that the caller checked."""
    rows, columns = slot.weight.shape
    width = min(COORDINATES, max(64, triton.next_power_of_2(columns)))
    height = COORDINATES // width
    programs = triton.cdiv(rows, height) * triton.cdiv(columns, width)
    partials = None
    if slot.norm_sq is not None:
        partials = torch.empty(programs, dtype=torch.float32, device=slot.weight.device)
    lookups = Lookups.of([segment for segment in segments if is_lookup(segment)])
    lookup_step_kernel[(programs,)](
        (lookups.ids, lookups.order, lookups.values, lookups.starts(rows, 1)),
        lookups.values.stride(),
        accumulator,
        None if accumulator is None else accumulator.stride(),
        as_bytes(slot.weight),
        slot.weight.stride(),
        slot.weight_scale,
        tuple(map(as_bytes, slot.states)),
        tuple(slot.scales),
        slot.master,
        state_strides,
        slot.scalars,
        None if slot.noise is None else slot.noise.words,
        multiplier,
        partials,
        rows,
        columns,
        UPDATE=compiled_update(slot.rule),
        CODES=compiled_codes(slot),
        ON_SCRATCH=slot.rule.on_scratch,
        N_SCALARS=slot.rule.n_scalars,
        GROUPED=slot.noise is not None and slot.noise.row_is_grouped,
        HEIGHT=height,
        WIDTH=width,
        num_warps=COORDINATES // WARP_COORDINATES,
    )
    if partials is not None:
        add_up(slot.norm_sq, partials, slot.late_norms)
