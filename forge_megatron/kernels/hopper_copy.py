"""The copy engine's warps of the Hopper kernel: operands in, weights and states in and out.

Their order and their barriers are :mod:`.hopper_kernel`'s contract.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

#: Triton 3.9 has new names for the copies.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)

#: Rows of a wgmma, hence of a panel of dY and of a sub-tile of the weight.
PANEL = gl.constexpr(64)


@gluon.jit
def tile_origin(tile, walk, TILE: gl.constexpr):
    """First row and column of ``tile``: ``group`` rows of tiles at a time, column by column."""
    tiles_o, tiles_i, group = walk
    per_group = group * tiles_i
    first = tile // per_group * group
    within = tile % per_group
    height = gl.minimum(tiles_o - first, group)
    column = within // height
    return (first + within - column * height) * TILE[0], column * TILE[1]


@gluon.jit
def produce_operands(walk, operands, stages, TILE: gl.constexpr):
    tiles = walk[0] * walk[1]
    dys, xs = operands
    a_ring, b_ring, full, empty = stages
    STAGES: gl.constexpr = b_ring.shape[0]
    PANELS: gl.constexpr = a_ring.shape[0] // STAGES
    BLOCK_T: gl.constexpr = b_ring.shape[1]
    BYTES: gl.constexpr = PANELS * dys[0].block_type.nbytes + xs[0].block_type.nbytes
    u = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        for segment in gl.static_range(len(dys)):
            for token in range(0, dys[segment].shape[0], BLOCK_T):
                stage = u % STAGES
                mbarrier.wait(empty.index(stage), ((u // STAGES) & 1) ^ 1)
                filled = full.index(stage)
                mbarrier.expect(filled, BYTES)
                for panel in gl.static_range(PANELS):
                    async_load(dys[segment], [token, row + panel * PANEL], filled, a_ring.index(stage * PANELS + panel))
                async_load(xs[segment], [token, column], filled, b_ring.index(stage))
                u += 1


@gluon.jit
def sub_tile_origin(index, row, column, TILE: gl.constexpr, PINGPONG: gl.constexpr):
    """Where the sub-tile ``index`` of a tile lies; shared tiles interleave the two consumers'."""
    SUB_I: gl.constexpr = TILE[2]
    WIDTH: gl.constexpr = TILE[1] // SUB_I
    if PINGPONG:
        return row + (index // WIDTH) * PANEL, column + (index % WIDTH) * SUB_I
    else:
        ROWS: gl.constexpr = TILE[0] // 2
        mine = index // 2
        return row + (index % 2) * ROWS + (mine // WIDTH) * PANEL, column + (mine % WIDTH) * SUB_I


@gluon.jit
def load_slots(walk, descriptors, slots, TILE: gl.constexpr, PINGPONG: gl.constexpr, BYTES: gl.constexpr):
    moved, rounded, added = descriptors
    moved_slots, _rounded_slots, added_slots, ready, _done, free = slots
    tiles = walk[0] * walk[1] if len(moved) + len(rounded) > 0 else 0
    SLOTS: gl.constexpr = TILE[3]
    COUNT: gl.constexpr = TILE[0] // PANEL * (TILE[1] // TILE[2])
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        for index in range(COUNT):
            slot = n % SLOTS
            r, c = sub_tile_origin(index, row, column, TILE, PINGPONG)
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            filled = ready.index(slot)
            if len(moved) + len(added) > 0:
                mbarrier.expect(filled, BYTES)
                for each in gl.static_range(len(moved)):
                    async_load(moved[each], [r, c], filled, moved_slots[each].index(slot))
                for each in gl.static_range(len(added)):
                    async_load(added[each], [r, c], filled, added_slots[each].index(slot))
            else:
                mbarrier.arrive(filled, count=1)
            n += 1


@gluon.jit
def store_slots(walk, descriptors, slots, TILE: gl.constexpr, PINGPONG: gl.constexpr):
    moved, rounded, _added = descriptors
    moved_slots, rounded_slots, _added_slots, _ready, done, free = slots
    tiles = walk[0] * walk[1] if len(moved) + len(rounded) > 0 else 0
    SLOTS: gl.constexpr = TILE[3]
    COUNT: gl.constexpr = TILE[0] // PANEL * (TILE[1] // TILE[2])
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        for index in range(COUNT):
            slot = n % SLOTS
            r, c = sub_tile_origin(index, row, column, TILE, PINGPONG)
            mbarrier.wait(done.index(slot), (n // SLOTS) & 1)
            for each in gl.static_range(len(moved)):
                async_store(moved[each], [r, c], moved_slots[each].index(slot))
            for each in gl.static_range(len(rounded)):
                async_store(rounded[each], [r, c], rounded_slots[each].index(slot))
            # Until the copies have been read, not until they are written.
            tma.store_wait(0)
            mbarrier.arrive(free.index(slot), count=1)
            n += 1
