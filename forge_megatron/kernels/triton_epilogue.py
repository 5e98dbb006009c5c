"""What every Triton kernel does with a gradient: load, step, keep what is not finite, store."""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

import triton
import triton.language as tl

from .triton_language import is_finite, round_to
from .triton_noise import decode_weight, encode_weight, round_stochastically, weight_scale_of


@triton.jit
def step_coordinates(
    g,
    inside,
    weight,
    weight_scale,
    master,
    states,
    scales,
    has_block,
    h,
    bits,
    UPDATE: tl.constexpr,
    CODES: tl.constexpr,
    MEASURED: tl.constexpr = False,
    ON_SCRATCH: tl.constexpr = False,
):
    """Step the coordinates that the pointers name by their gradient.

    Args:
        g: fp32; every other argument has its shape, but for scales and ``has_block``. With scales, of states
            or of the weight, it is ``[blocks, 64]``.
        inside: where there is a coordinate at all; ``[blocks, 1]`` if no block is shorter than 64.
        weight, states: pointers; master: pointers, or None.
        weight_scale: pointers ``[blocks]``, or None; with them ``weight`` points to e4m3 as bytes, and has no master.
        scales: pointers ``[blocks]``, one tensor a state, or none at all.
        has_block: where there is a block.
        h: the rule's scalars.
        bits: uint32, to round the weight stochastically, or None.
        MEASURED: the update reads more than its coordinate: one that it would leave not finite is left alone too.
        ON_SCRATCH: the weight is only written; what is not stepped becomes NaN.
        CODES: ``(decode, encode)`` of each state, and ``scale`` where there are scales.
    """
    IN_BLOCKS: tl.constexpr = weight_scale is not None or len(scales) > 0
    if ON_SCRATCH:
        w = tl.full(g.shape, float("nan"), tl.float32)
    elif weight_scale is not None:
        old_scale = tl.load(weight_scale, mask=has_block, other=0.0).to(tl.float32)
        w = decode_weight(tl.load(weight, mask=inside, other=0), old_scale[:, None])
    elif master is not None:
        w = tl.load(master, mask=inside, other=0.0)
    else:
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    old = ()
    for index in tl.static_range(len(states)):
        # The scale 1 is not read: Triton 3.6 passes no None between functions.
        scale = 1.0
        if len(scales) > 0:
            scale = tl.load(scales[index], mask=has_block, other=0.0).to(tl.float32)[:, None]
        old = old + (CODES[index][0](tl.load(states[index], mask=inside, other=0), scale),)
    new_w, new = UPDATE(g, w, old, h)
    if MEASURED:
        g = tl.where(is_finite(tl.where(inside, new_w, 0.0)), g, float("nan"))
    # What is finite changes layout through shared memory: here, and not before the loads, which would wait for that.
    if IN_BLOCKS:
        # A block is one number of many digits: all of it is stepped, or none. What is not finite is NaN times zero.
        steps_block = has_block & (tl.sum(g * 0.0, 1) == 0.0)
        # A mask that is the same for all of a block splits no vector store.
        written = inside & steps_block[:, None]
        w = tl.where(steps_block[:, None], new_w, float("nan")) if ON_SCRATCH else new_w
    else:
        # Selecting values, not masking stores: a mask that differs between neighbours would split every vector store.
        finite = is_finite(g)
        written = inside
        w = tl.where(finite, new_w, w)
    for index in tl.static_range(len(states)):
        value = new[index]
        if len(scales) > 0:
            if inside.shape[1] > 1:
                value = tl.where(inside, value, 0.0)
            scale = CODES[index][2](tl.max(tl.abs(value), 1))
            tl.store(states[index], CODES[index][1](value, scale[:, None]), mask=written)
            tl.store(scales[index], round_to(scale, tl.bfloat16), mask=steps_block)
        else:
            if not IN_BLOCKS:
                value = tl.where(finite, value, old[index])
            tl.store(states[index], CODES[index][1](value, 1.0), mask=written)
    if ON_SCRATCH:
        tl.store(weight, w, mask=inside)
    elif weight_scale is not None:
        scale = weight_scale_of(tl.max(tl.abs(tl.where(inside, w, 0.0)), 1))
        tl.store(weight, encode_weight(w, scale[:, None], bits), mask=written)
        tl.store(weight_scale, round_to(scale, tl.bfloat16), mask=steps_block)
    else:
        if master is not None:
            tl.store(master, w, mask=written)
        if bits is not None:
            tl.store(weight, round_stochastically(w, bits), mask=written)
        else:
            tl.store(weight, round_to(w, weight.dtype.element_ty), mask=written)


@triton.jit
def by_blocks(program, size, columns, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Where a program's coordinates lie, if it steps ``BLOCK`` of them in blocks of 64 within rows.

    Args:
        program: int64, of this weight; ``size`` and ``columns`` (its last dimension): the weight's.
        WHOLE: ``columns`` is a multiple of 64.

    Returns:
        offsets and which of them are inside, ``[BLOCK / 64, 64]``; of the blocks the numbers, which of them are
        inside, and the offsets at which they begin.
    """
    block = program * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
    lane = tl.arange(0, 64)[None, :]
    if WHOLE:
        begin = block * 64
        has_block = begin < size
        return begin[:, None] + lane, has_block[:, None], block, has_block, begin
    else:
        blocks_per_row = tl.cdiv(columns, 64)
        row = block // blocks_per_row
        column = (block - row * blocks_per_row) * 64
        begin = row * columns + column
        has_block = row * columns < size
        inside = has_block[:, None] & (column[:, None] + lane < columns)
        return begin[:, None] + lane, inside, block, has_block, begin
