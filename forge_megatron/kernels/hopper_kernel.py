"""The fused weight gradient and optimizer step on Hopper: warp-specialised and persistent.

One CTA a multiprocessor walks the tiles of ``G = sum dY^T X``. Five kinds of warp work at once:

- the operand producer (one warp) fills a ring of stages with blocks of dY and X by TMA;
- two consumer warpgroups run wgmma on the stages and then the rule on the tile's registers;
- the loader (one warp) fills a ring of slots with the tile's weight and states by TMA, in
  sub-tiles of 64 rows, as far ahead as there are slots;
- the storer (one warp) writes the slots back by TMA once they hold the stepped values.

So a tile's weight and states travel while tensor cores work on another tile. ``PINGPONG`` gives the
two consumers alternate tiles, so that one multiplies while the other steps; otherwise both share
a tile that is twice as tall, which halves the traffic of X.

Synchronisation, all of it by mbarriers in shared memory. ``u`` counts stages and ``n`` counts
sub-tiles, both in the one order in which this CTA walks its tiles; ``u`` lives in stage
``u % STAGES``, ``n`` in slot ``n % SLOTS``, and their barriers complete phase ``u // STAGES`` and
``n // SLOTS``.

====== ======================= ============================================ =====================
name   completed by            waited for by                                arrivals
====== ======================= ============================================ =====================
full   TMA bytes               the consumers of u                           1 (expect) and bytes
empty  the consumers of u      the producer, before u + STAGES              1 pingpong, 2 shared
ready  TMA bytes               the one consumer of n                        1 (expect) and bytes
done   the one consumer of n   the storer                                   1
free   the storer, once n has  the loader, before n + SLOTS                 1
       been read
turn   the other consumer      pingpong: before the first ``full`` of a job 1
step   the other consumer      pingpong: before the first ``ready`` of a job 1
====== ======================= ============================================ =====================

A wait by parity only tells a phase from its neighbours, so nobody may wait for a phase whose
predecessor might still be open. Producer, loader and storer each walk u or n in order. Shared
tiles: both consumers take every u, so neither can be a phase ahead; SLOTS is even and consumer c
takes the n with ``n % 2 == c``, so a slot has one consumer, which takes its phases in order.
Pingpong: a consumer gets its turn only after the other has waited for all earlier u (``turn``)
and all earlier n (``step``), so the phase before the one it waits for is complete.

The rule's code is a loop over sub-tiles, whose accumulators move down by a sub-tile each time.
Written out for a whole tile, two consumers' code is more than the instruction cache holds.

What is written is the weight and its states, or with ``RULE`` None the gradient itself; and with no
``written`` at all only its norm remains. Then nothing takes the slots but what is written: the loader
hands over empty ones, or with ``ADD`` those of what the gradient is added to. A weight that is a scratch is written
and not read either, beside its states.

With ``experts`` the weight is ``[experts, O, I]``, their tiles follow one another, and a tile sums over its expert's
tokens, which lie between its bounds in device memory. One without any has no u: its gradient is 0. What cuts boxes at
an expert's last row and last token is :mod:`.hopper_descriptors`'s.
"""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_copy import (
    PANEL,
    blocks_of,
    expert_of,
    load_slots,
    produce_operands,
    store_slots,
    sub_tile_origin,
    tile_origin,
    tiles_of,
)
from .hopper_epilogue import (
    THREADS_OF_A_ROW,
    gradient_parts,
    load_noise,
    own_squares,
    step_sub_tile,
    write_sub_tile,
)


@gluon.jit
def column_parts(tile, PARTS: gl.constexpr, layout: gl.constexpr):
    """Cut a tile into ``PARTS`` (a power of two) tiles of adjacent columns: registers, not moves."""
    parts = (tile,)
    for _ in gl.static_range(PARTS.bit_length() - 1):
        halves = ()
        for index in gl.static_range(len(parts)):
            whole = parts[index]
            pair = whole.reshape([whole.shape[0], 2, whole.shape[1] // 2]).permute(0, 2, 1)
            halves = halves + pair.split()
        parts = halves
    converted = ()
    for index in gl.static_range(len(parts)):
        converted = converted + (gl.convert_layout(parts[index], layout, assert_trivial=True),)
    return converted


@gluon.jit
def shifted(tiles, BY: gl.constexpr):
    """``tiles`` without the first ``BY``; the last ``BY`` are there twice, which is free."""
    rest = ()
    for index in gl.static_range(len(tiles)):
        rest = rest + (tiles[index + BY if index + BY < len(tiles) else index],)
    return rest


@gluon.jit
def consume(
    walk,
    tokens,
    stages,
    slots,
    order,
    inputs,
    RULE: gl.constexpr,
    TILE: gl.constexpr,
    PINGPONG: gl.constexpr,
    CHUNKS: gl.constexpr,
    SELF: gl.constexpr,
):
    tiles = tiles_of(walk)
    GROUPED: gl.constexpr = len(walk) == 4
    a_ring, b_ring, full, empty = stages
    moved_slots, rounded_slots, added_slots, ready, done, _free = slots
    scalars, noise, multiplier, partials, rows = inputs
    turn, step = order
    STAGES: gl.constexpr = b_ring.shape[0]
    BLOCK_T: gl.constexpr = b_ring.shape[1]
    BLOCK_I: gl.constexpr = b_ring.shape[2]
    ALL_PANELS: gl.constexpr = a_ring.shape[0] // STAGES
    PANELS: gl.constexpr = ALL_PANELS if PINGPONG else ALL_PANELS // 2
    FIRST_PANEL: gl.constexpr = 0 if PINGPONG else SELF * PANELS
    SUB_I: gl.constexpr = TILE[2]
    SLOTS: gl.constexpr = TILE[3]
    PARTS: gl.constexpr = BLOCK_I // SUB_I
    #: Sub-tiles of a job, and from one of this consumer's to its next.
    COUNT: gl.constexpr = ALL_PANELS * PARTS
    STRIDE: gl.constexpr = 1 if PINGPONG else 2
    FIRST: gl.constexpr = 0 if PINGPONG else SELF
    JOBS: gl.constexpr = 2 if PINGPONG else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_I, 16])
    WIDTH: gl.constexpr = SUB_I // CHUNKS
    sub: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    IN_SLOTS: gl.constexpr = len(moved_slots) + len(rounded_slots) > 0

    h = ()
    if RULE is not None:
        N_SCALARS: gl.constexpr = RULE[1]
        for index in gl.static_range(N_SCALARS):
            h = h + (gl.load(scalars + index),)
    words = load_noise(noise)
    scale = 1.0
    if len(multiplier) > 0:
        scale = gl.load(multiplier[0])

    job = SELF if PINGPONG else 0
    first = gl.program_id(0) + job * gl.num_programs(0)
    u = 0
    if job == 1:
        u += blocks_of(tokens, expert_of(gl.program_id(0), walk), BLOCK_T, GROUPED)
    for tile in range(first, tiles, JOBS * gl.num_programs(0)):
        tile_row, tile_column = tile_origin(tile, walk, TILE)
        expert = expert_of(tile, walk)
        blocks = blocks_of(tokens, expert, BLOCK_T, GROUPED)
        if PINGPONG:
            # Phase p of turn[c] ends c's p-th wait; consumer 0's first needs nobody.
            mbarrier.wait(turn.index(SELF), ((job // 2) & 1) ^ (1 - SELF))
        acc = ()
        for _ in gl.static_range(PANELS):
            acc = acc + (gl.zeros([PANEL, BLOCK_I], gl.float32, mma),)
        for block in range(blocks):
            stage = u % STAGES
            mbarrier.wait(full.index(stage), (u // STAGES) & 1)
            issued = ()
            for panel in gl.static_range(PANELS):
                a = a_ring.index(stage * ALL_PANELS + FIRST_PANEL + panel).permute((1, 0))
                issued = issued + (warpgroup_mma(a, b_ring.index(stage), acc[panel], is_async=True),)
            acc = all_but(issued, PANELS)
            # The block before this one has been multiplied.
            mbarrier.arrive(empty.index((u + STAGES - 1) % STAGES), count=1, pred=block > 0)
            u += 1
        if PINGPONG:
            mbarrier.arrive(turn.index(1 - SELF), count=1)
        acc = all_but(acc, 0)
        mbarrier.arrive(empty.index((u + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
        if PINGPONG:
            # The other consumer's next tile; beyond the last there is none, and nobody counts.
            other = gl.minimum(tile + gl.num_programs(0), tiles - 1)
            u += blocks_of(tokens, expert_of(other, walk), BLOCK_T, GROUPED)

        squares = gl.zeros([PANEL, 4], gl.float32, THREADS_OF_A_ROW)
        tiles_left = ()
        for panel in gl.static_range(PANELS):
            tiles_left = tiles_left + column_parts(acc[panel], PARTS * CHUNKS, sub)
        if not IN_SLOTS:
            for each in gl.static_range(len(tiles_left)):
                squares += own_squares(tiles_left[each])
        else:
            if PINGPONG:
                mbarrier.wait(step.index(SELF), ((job // 2) & 1) ^ (1 - SELF))
            for nth in range(PANELS * PARTS):
                row, column = sub_tile_origin(FIRST + nth * STRIDE, tile_row, tile_column, TILE, PINGPONG)
                n = job * COUNT + FIRST + nth * STRIDE
                slot = n % SLOTS
                mbarrier.wait(ready.index(slot), (n // SLOTS) & 1)
                if PINGPONG:
                    mbarrier.arrive(step.index(1 - SELF), count=1, pred=nth == COUNT - 1)
                parts, squares = gradient_parts(
                    tiles_left, added_slots, slot, scale, squares, len(multiplier) > 0, len(partials) > 0, CHUNKS, sub
                )
                # All experts are one tensor, of which the rows are numbered through.
                place = (slot, row + expert * rows if GROUPED else row, column)
                if RULE is None:
                    write_sub_tile(parts, (moved_slots, rounded_slots), place, CHUNKS, sub)
                else:
                    step_sub_tile(parts, (moved_slots, rounded_slots), place, h, words, RULE, CHUNKS, sub)
                # The copy engine reads next what these threads wrote.
                fence_async_shared()
                mbarrier.arrive(done.index(slot), count=1)
                tiles_left = shifted(tiles_left, CHUNKS)
        if len(partials) > 0:
            # One a warp: their sum would wait for all of them.
            warps: gl.constexpr = gl.DistributedLinearLayout([], [[0]] * 5, [[1], [2]], [], [4])
            by_warp = gl.convert_layout(gl.sum(gl.sum(squares, 1).reshape([4, 16]), 1), warps, assert_trivial=True)
            cell = tile if PINGPONG else 2 * tile + SELF
            gl.store(partials[0] + 4 * cell + gl.arange(0, 4, layout=warps), by_warp)
        job += JOBS


@gluon.jit
def all_but(issued, COUNT: gl.constexpr):
    """Wait for all but the last ``COUNT`` wgmmas; ``issued`` are one or two accumulators."""
    if len(issued) == 1:
        return (warpgroup_mma_wait(COUNT, deps=(issued[0],)),)
    else:
        return warpgroup_mma_wait(COUNT, deps=(issued[0], issued[1]))


@gluon.jit
def ring(DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, COLUMNS], layout)


@gluon.jit
def slot_buffers(descriptors, SUB_I: gl.constexpr, SLOTS: gl.constexpr):
    buffers = ()
    for each in gl.static_range(len(descriptors)):
        buffers = buffers + (ring(descriptors[each].dtype, SLOTS, PANEL, SUB_I),)
    return buffers


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    allocated = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(allocated.index(index), count=ARRIVALS)
    return allocated


@gluon.jit(do_not_specialize=["group", "experts"])
def hopper_wgrad_step_kernel(
    dy0,
    dy1,
    dy2,
    dy3,
    x0,
    x1,
    x2,
    x3,
    bounds0,
    bounds1,
    bounds2,
    bounds3,
    written,
    master,
    state0,
    state1,
    state2,
    added,
    scalars,
    noise,
    multiplier,
    partials,
    group,
    experts,
    RULE: gl.constexpr,
    ADD: gl.constexpr,
    OPERAND: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    SLOT_BYTES: gl.constexpr,
    PINGPONG: gl.constexpr,
    CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    # What is absent is left out of a tuple: a partition takes no None.
    dys = () if dy0 is None else (dy0,)
    dys = dys if dy1 is None else dys + (dy1,)
    dys = dys if dy2 is None else dys + (dy2,)
    dys = dys if dy3 is None else dys + (dy3,)
    xs = () if x0 is None else (x0,)
    xs = xs if x1 is None else xs + (x1,)
    xs = xs if x2 is None else xs + (x2,)
    xs = xs if x3 is None else xs + (x3,)
    bounds = () if bounds0 is None else (bounds0,)
    bounds = bounds if bounds1 is None else bounds + (bounds1,)
    bounds = bounds if bounds2 is None else bounds + (bounds2,)
    bounds = bounds if bounds3 is None else bounds + (bounds3,)
    outputs = () if written is None else (written,)
    READ: gl.constexpr = ADD if RULE is None else not RULE[2]
    moved = outputs if READ else ()
    rounded = () if READ else outputs
    moved = moved if master is None else (master,)
    rounded = rounded if master is None else outputs
    moved = moved if state0 is None else moved + (state0,)
    moved = moved if state1 is None else moved + (state1,)
    moved = moved if state2 is None else moved + (state2,)
    added = () if added is None else (added,)
    noise = () if noise is None else (noise,)
    multiplier = () if multiplier is None else (multiplier,)
    partials = () if partials is None else (partials,)

    TILE_O: gl.constexpr = TILE[0]
    TILE_I: gl.constexpr = TILE[1]
    SLOTS: gl.constexpr = TILE[3]
    PANELS: gl.constexpr = TILE_O // PANEL
    a_ring = ring(OPERAND, STAGES * PANELS, BLOCK_T, PANEL)
    b_ring = ring(OPERAND, STAGES, BLOCK_T, TILE_I)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1 if PINGPONG else 2)

    moved_slots = slot_buffers(moved, TILE[2], SLOTS)
    rounded_slots = slot_buffers(rounded, TILE[2], SLOTS)
    added_slots = slot_buffers(added, TILE[2], SLOTS)
    ready = barriers(SLOTS, 1)
    done = barriers(SLOTS, 1)
    free = barriers(SLOTS, 1)
    order = (barriers(2, 1), barriers(2, 1))
    # The copy engine arrives at these barriers: it must see them initialised.
    fence_async_shared()

    rows = dys[0].shape[len(dys[0].block_type.shape) - 1]
    columns = xs[0].shape[len(xs[0].block_type.shape) - 1]
    walk = (gl.cdiv(rows, TILE_O), gl.cdiv(columns, TILE_I), group)
    tokens = bounds
    if experts is None:
        for segment in gl.static_range(len(dys)):
            tokens = tokens + (dys[segment].shape[0],)
    else:
        walk = walk + (experts,)
    stages = (a_ring, b_ring, full, empty)
    slots = (moved_slots, rounded_slots, added_slots, ready, done, free)
    descriptors = (moved, rounded, added)
    inputs = (scalars, noise, multiplier, partials, rows)
    gl.warp_specialize(
        [
            (consume, (walk, tokens, stages, slots, order, inputs, RULE, TILE, PINGPONG, CHUNKS, 0)),
            (consume, (walk, tokens, stages, slots, order, inputs, RULE, TILE, PINGPONG, CHUNKS, 1)),
            (produce_operands, (walk, tokens, (dys, xs), stages, TILE)),
            (load_slots, (walk, descriptors, slots, TILE, PINGPONG, SLOT_BYTES)),
            (store_slots, (walk, descriptors, slots, TILE, PINGPONG)),
        ],
        [4, 1, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1], REGISTERS[1]],
    )
