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
def tiles_of(walk):
    """Tiles of the weight, or of all experts."""
    tiles = walk[0] * walk[1]
    if len(walk) == 4:
        tiles = tiles * walk[3]
    return tiles


@gluon.jit
def expert_of(tile, walk):
    """The expert whose ``tile`` is: their tiles follow one another."""
    if len(walk) == 4:
        return tile // (walk[0] * walk[1])
    else:
        return 0


@gluon.jit
def tile_origin(tile, walk, TILE: gl.constexpr):
    """First row and column of ``tile``: ``group`` rows of tiles at a time, column by column."""
    tiles_o, tiles_i, group = walk[0], walk[1], walk[2]
    if len(walk) == 4:
        tile = tile % (tiles_o * tiles_i)
    per_group = group * tiles_i
    first = tile // per_group * group
    within = tile % per_group
    height = gl.minimum(tiles_o - first, group)
    column = within // height
    return (first + within - column * height) * TILE[0], column * TILE[1]


@gluon.jit
def span(tokens, expert, GROUPED: gl.constexpr):
    """First token of ``expert`` in a segment, and the one after its last."""
    if GROUPED:
        return gl.load(tokens + expert), gl.load(tokens + expert + 1)
    else:
        return 0, tokens


@gluon.jit
def blocks_of(tokens, expert, BLOCK_T: gl.constexpr, GROUPED: gl.constexpr):
    """Blocks of tokens in all segments; no block has tokens of two experts."""
    blocks = 0
    for segment in gl.static_range(len(tokens)):
        begin, end = span(tokens[segment], expert, GROUPED)
        blocks += gl.cdiv(end - begin, BLOCK_T)
    return blocks


@gluon.jit
def corner(expert, row, column, GROUPED: gl.constexpr):
    """Coordinates in a matrix, or in that of ``expert``."""
    if GROUPED:
        return expert, row, column
    else:
        return row, column


@gluon.jit
def window(token, end, column, BLOCK_T: gl.constexpr, GROUPED: gl.constexpr):
    """Coordinates of a block of operands in a matrix, or in one of windows from any token on.

    In the last block of an expert the next one's tokens would follow its own. So its window begins at negative rows,
    which the copy engine fills with zeros, and ends at the last token; X and dY alike, hence in the same order.
    """
    if GROUPED:
        return token, gl.minimum(end - token - BLOCK_T, 0), column
    else:
        return token, column


@gluon.jit
def produce_operands(walk, tokens, operands, stages, TILE: gl.constexpr):
    GROUPED: gl.constexpr = len(walk) == 4
    tiles = tiles_of(walk)
    dys, xs = operands
    a_ring, b_ring, full, empty = stages
    STAGES: gl.constexpr = b_ring.shape[0]
    PANELS: gl.constexpr = a_ring.shape[0] // STAGES
    BLOCK_T: gl.constexpr = b_ring.shape[1]
    BYTES: gl.constexpr = PANELS * dys[0].block_type.nbytes + xs[0].block_type.nbytes
    u = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        expert = expert_of(tile, walk)
        for segment in gl.static_range(len(dys)):
            begin, end = span(tokens[segment], expert, GROUPED)
            for token in range(begin, end, BLOCK_T):
                stage = u % STAGES
                mbarrier.wait(empty.index(stage), ((u // STAGES) & 1) ^ 1)
                filled = full.index(stage)
                mbarrier.expect(filled, BYTES)
                for panel in gl.static_range(PANELS):
                    place = window(token, end, row + panel * PANEL, BLOCK_T, GROUPED)
                    async_load(dys[segment], place, filled, a_ring.index(stage * PANELS + panel))
                async_load(xs[segment], window(token, end, column, BLOCK_T, GROUPED), filled, b_ring.index(stage))
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
    GROUPED: gl.constexpr = len(walk) == 4
    tiles = tiles_of(walk) if len(moved) + len(rounded) > 0 else 0
    SLOTS: gl.constexpr = TILE[3]
    COUNT: gl.constexpr = TILE[0] // PANEL * (TILE[1] // TILE[2])
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        expert = expert_of(tile, walk)
        for index in range(COUNT):
            slot = n % SLOTS
            r, c = sub_tile_origin(index, row, column, TILE, PINGPONG)
            place = corner(expert, r, c, GROUPED)
            mbarrier.wait(free.index(slot), ((n // SLOTS) & 1) ^ 1)
            filled = ready.index(slot)
            if len(moved) + len(added) > 0:
                mbarrier.expect(filled, BYTES)
                for each in gl.static_range(len(moved)):
                    async_load(moved[each], place, filled, moved_slots[each].index(slot))
                for each in gl.static_range(len(added)):
                    async_load(added[each], place, filled, added_slots[each].index(slot))
            else:
                mbarrier.arrive(filled, count=1)
            n += 1


@gluon.jit
def store_slots(walk, descriptors, slots, TILE: gl.constexpr, PINGPONG: gl.constexpr):
    moved, rounded, _added = descriptors
    moved_slots, rounded_slots, _added_slots, _ready, done, free = slots
    GROUPED: gl.constexpr = len(walk) == 4
    tiles = tiles_of(walk) if len(moved) + len(rounded) > 0 else 0
    SLOTS: gl.constexpr = TILE[3]
    COUNT: gl.constexpr = TILE[0] // PANEL * (TILE[1] // TILE[2])
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = tile_origin(tile, walk, TILE)
        expert = expert_of(tile, walk)
        for index in range(COUNT):
            slot = n % SLOTS
            r, c = sub_tile_origin(index, row, column, TILE, PINGPONG)
            place = corner(expert, r, c, GROUPED)
            mbarrier.wait(done.index(slot), (n // SLOTS) & 1)
            for each in gl.static_range(len(moved)):
                async_store(moved[each], place, moved_slots[each].index(slot))
            for each in gl.static_range(len(rounded)):
                async_store(rounded[each], place, rounded_slots[each].index(slot))
            # Until the copies have been read, not until they are written.
            tma.store_wait(0)
            mbarrier.arrive(free.index(slot), count=1)
            n += 1
