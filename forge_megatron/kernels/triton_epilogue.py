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
):
    """Step the coordinates that the pointers name by their gradient.

    Args:
        g: fp32; every other argument has its shape, but for scales and ``has_block``. With scales, of states
            or of the weight, it is ``[blocks, 64]``.
        inside: where there is a coordinate at all.
        weight, states: pointers; master: pointers, or None.
        weight_scale: pointers ``[blocks]``, or None; with them ``weight`` points to e4m3 as bytes, and has no master.
        scales: pointers ``[blocks]``, one tensor a state, or none at all.
        has_block: where there is a block.
        h: the rule's scalars.
        bits: uint32, to round the weight stochastically, or None.
        CODES: ``(decode, encode)`` of each state, and ``scale`` where there are scales.
    """
    if weight_scale is not None:
        weight_code = tl.load(weight, mask=inside, other=0)
        old_scale = tl.load(weight_scale, mask=has_block, other=0.0)
        w = decode_weight(weight_code, old_scale[:, None])
    elif master is not None:
        w = tl.load(master, mask=inside, other=0.0)
    else:
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    if len(scales) == 0:
        # The scale 1 is not read: Triton 3.6 passes no None between functions.
        old = ()
        for index in tl.static_range(len(states)):
            old = old + (CODES[index][0](tl.load(states[index], mask=inside, other=0.0), 1.0),)
        new_w, new = UPDATE(g, w, old, h)
        # Selecting values, not masking stores: a mask that differs between neighbours would split every vector store.
        # Made here and not before the loads: it changes layout through shared memory, and they would wait for that.
        if weight_scale is not None:
            block_is_finite = tl.min(is_finite(g).to(tl.int32), 1) != 0
            finite = block_is_finite[:, None] & (g == g)
        else:
            finite = is_finite(g)
        for index in tl.static_range(len(states)):
            kept = tl.where(finite, new[index], old[index])
            tl.store(states[index], CODES[index][1](kept, 1.0), mask=inside)
    else:
        # A block is one number of many digits: all of it is stepped, or none.
        block_is_finite = tl.min(is_finite(g).to(tl.int32), 1) != 0
        finite = block_is_finite[:, None] & (g == g)
        stored = ()
        scaled = ()
        old = ()
        for index in tl.static_range(len(states)):
            code = tl.load(states[index], mask=inside, other=0)
            scale = tl.load(scales[index], mask=has_block, other=0.0)
            stored = stored + (code,)
            scaled = scaled + (scale,)
            old = old + (CODES[index][0](code, scale[:, None]),)
        new_w, new = UPDATE(g, w, old, h)
        for index in tl.static_range(len(states)):
            value = tl.where(inside, new[index], 0.0)
            scale = CODES[index][2](tl.max(tl.abs(value), 1))
            code = CODES[index][1](value, scale[:, None])
            tl.store(states[index], tl.where(finite, code, stored[index]), mask=inside)
            tl.store(scales[index], tl.where(block_is_finite, scale, scaled[index]), mask=has_block)
    w = tl.where(finite, new_w, w)
    if weight_scale is not None:
        scale = weight_scale_of(tl.max(tl.abs(tl.where(inside, w, 0.0)), 1))
        code = encode_weight(w, scale[:, None], bits)
        tl.store(weight, tl.where(finite, code, weight_code), mask=inside)
        tl.store(weight_scale, tl.where(block_is_finite, scale, old_scale), mask=has_block)
    else:
        if master is not None:
            tl.store(master, w, mask=inside)
        if bits is not None:
            tl.store(weight, round_stochastically(w, bits), mask=inside)
        else:
            tl.store(weight, round_to(w, weight.dtype.element_ty), mask=inside)


@triton.jit
def by_blocks(program, size, columns, BLOCK: tl.constexpr):
    """Where a program's coordinates lie, if it steps ``BLOCK`` of them in blocks of 64 within rows.

    Args:
        program: int64, of this weight; ``size`` and ``columns`` (its last dimension): the weight's.

    Returns:
        offsets and which of them are inside, ``[BLOCK / 64, 64]``; of the blocks the numbers, which of them are
        inside, and the offsets at which they begin.
    """
    blocks_per_row = tl.cdiv(columns, 64)
    block = program * (BLOCK // 64) + tl.arange(0, BLOCK // 64)
    row = block // blocks_per_row
    column = (block - row * blocks_per_row) * 64
    begin = row * columns + column
    has_block = row * columns < size
    lane = tl.arange(0, 64)[None, :]
    inside = has_block[:, None] & (column[:, None] + lane < columns)
    return begin[:, None] + lane, inside, block, has_block, begin
