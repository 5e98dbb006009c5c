"""What a consumer of the Hopper kernel does with a sub-tile of the gradient: step it in its slot, or write it there.

The arithmetic and its order are those of :mod:`.triton_epilogue`, so that equal gradients make equal bits.
"""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .triton_noise import counter_words, philox, round_stochastically

#: Of ``[64, 4]``: the rows of a panel by the threads that share them.
THREADS_OF_A_ROW = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)


@gluon.jit
def widen(x):
    """``x`` in fp32. A pair of bf16 takes two instructions; the compiler's own way takes three."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """fp32 ``x`` rounded to ``dtype``, to nearest even.

    Left to the compiler, the rounding would move into the branches of a select before it, and
    pairs of values would no longer be rounded by one instruction.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype)


@gluon.jit
def columns(slots, slot, chunk: gl.constexpr, WIDTH: gl.constexpr):
    if slots.shape[2] == WIDTH:
        return slots.index(slot)
    else:
        return slots.index(slot).slice(chunk * WIDTH, WIDTH, dim=1)


@gluon.jit
def is_finite(x):
    return gl.abs(x) <= 3.4028234663852886e38


@gluon.jit
def load_noise(noise):
    """The words of a ``Noise`` that place a matrix, once for a whole launch; none without it."""
    words = ()
    if len(noise) > 0:
        for index in gl.static_range(5):
            words = words + (gl.load(noise[0] + index),)
    return words


@gluon.jit
def bits_of(words, row, column, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Random bits ``[64, WIDTH]`` from ``(row, column)`` on; ``column`` is a multiple of 4 in the whole weight too.

    A thread makes the four words of one group at a time and then trades two of them with its neighbour, which has
    made those of the row eight below: pairs of columns are what it has of the gradient.
    """
    GROUPS: gl.constexpr = WIDTH // 4
    registers: gl.constexpr = [[0, 2], [0, 4], [0, 8]][: GROUPS.bit_length() - 2]
    grouped: gl.constexpr = gl.DistributedLinearLayout(
        registers, [[8, 0], [0, 1], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, GROUPS]
    )
    key, first_row, first_column, split, jump = words
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, grouped)).to(gl.int64)
    rows = (rows + first_row + gl.where(rows >= split, jump, 0)).expand_dims(1)
    groups = (column + first_column) // 4 + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, grouped)).to(gl.int64)
    group_low, group_high = counter_words(groups.expand_dims(0))
    row_low, row_high = counter_words(rows)
    key_low, key_high = counter_words(key)
    called = philox(group_low, group_high, row_low, row_high, key_low, key_high)
    bits = gl.join(gl.join(called[0], called[2]), gl.join(called[1], called[3]))
    return gl.convert_layout(bits.reshape([64, WIDTH]), layout)


@gluon.jit
def store_weight(w, slots, place, chunk: gl.constexpr, words, layout: gl.constexpr):
    """Round a chunk of the weight into its slot, to nearest or by the noise's bits."""
    slot, row, column = place
    WIDTH: gl.constexpr = w.shape[1]
    into = columns(slots, slot, chunk, WIDTH)
    if len(words) > 0:
        into.store(round_stochastically(w, bits_of(words, row, column + chunk * WIDTH, WIDTH, layout)))
    else:
        into.store(narrow(w, slots.dtype))


@gluon.jit
def own_squares(g):
    """Sums of squares of what each thread has of every row, ``[64, 4]``: no thread waits for another."""
    pairs = (g * g).reshape([64, g.shape[1] // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(pairs, 3), 1), THREADS_OF_A_ROW, assert_trivial=True)


@gluon.jit
def gradient_parts(
    parts,
    added_slots,
    slot,
    scale,
    squares,
    SCALED: gl.constexpr,
    NORM: gl.constexpr,
    CHUNKS: gl.constexpr,
    layout: gl.constexpr,
):
    """Of the first ``CHUNKS`` of ``parts``: add what was summed before and its squares to theirs; and multiply."""
    made = ()
    for chunk in gl.static_range(CHUNKS):
        g = parts[chunk]
        for each in gl.static_range(len(added_slots)):
            g += widen(columns(added_slots[each], slot, chunk, g.shape[1]).load(layout))
        if NORM:
            squares += own_squares(g)
        if SCALED:
            g = g * scale
        made = made + (g,)
    return made, squares


@gluon.jit
def write_sub_tile(parts, slots, place, CHUNKS: gl.constexpr, layout: gl.constexpr):
    """Write the gradient into its slot, or add it to what is there."""
    moved_slots, rounded_slots = slots
    for chunk in gl.static_range(CHUNKS):
        g = parts[chunk]
        for each in gl.static_range(len(moved_slots)):
            into = columns(moved_slots[each], place[0], chunk, g.shape[1])
            into.store(narrow(g + widen(into.load(layout)), moved_slots[each].dtype))
        for each in gl.static_range(len(rounded_slots)):
            columns(rounded_slots[each], place[0], chunk, g.shape[1]).store(narrow(g, rounded_slots[each].dtype))


@gluon.jit
def step_sub_tile(parts, slots, place, h, words, RULE: gl.constexpr, CHUNKS: gl.constexpr, layout: gl.constexpr):
    """Step a sub-tile, whose states are stored as they are."""
    moved_slots, rounded_slots = slots
    UPDATE: gl.constexpr = RULE[0]
    FIRST: gl.constexpr = 0 if RULE[2] else 1
    WIDTH: gl.constexpr = parts[0].shape[1]
    for chunk in gl.static_range(CHUNKS):
        g = parts[chunk]
        if FIRST == 0:
            source = gl.full([64, WIDTH], float("nan"), gl.float32, layout)
        else:
            source = widen(columns(moved_slots[0], place[0], chunk, WIDTH).load(layout))
        old = ()
        for each in gl.static_range(FIRST, len(moved_slots)):
            old = old + (widen(columns(moved_slots[each], place[0], chunk, WIDTH).load(layout)),)
        new_w, new = UPDATE(g, source, old, h)
        finite = is_finite(g)
        w = gl.where(finite, new_w, source)
        for each in gl.static_range(FIRST, len(moved_slots)):
            kept = gl.where(finite, new[each - FIRST], old[each - FIRST])
            columns(moved_slots[each], place[0], chunk, WIDTH).store(narrow(kept, moved_slots[each].dtype))
        if FIRST == 1:
            store_weight(w, moved_slots[0], place, chunk, words, layout)
        for each in gl.static_range(len(rounded_slots)):
            columns(rounded_slots[each], place[0], chunk, WIDTH).store(narrow(w, rounded_slots[each].dtype))
