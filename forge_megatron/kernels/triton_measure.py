"""What a rule measures of a gradient, while a tile of it is in registers: the portable Triton kernel.

A program writes the means or largest values of its own tile, of its rows, its columns or all of it; the tiles' are
brought together in a fixed order, because atomics would sum in another one on every replica.
"""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .measured import Reading
from .norms import add_up
from .slot import Slot, has_shared_strides, layout, shared_strides
from .triton_language import compiled, load_scalars, round_to
from .triton_launch import Launch, launched
from .triton_tile import (
    OF_ALL,
    PER_COLUMN,
    PER_ROW,
    add_lookups,
    column_parts,
    gradient_tile,
    in_range,
    kinds_of,
    load_factors,
    locate,
    tile_position,
)
from .triton_wgrad import TOKENS, step_arguments, wgrad_step_kernel

#: What a number is of, by the dimensions of a matrix that it is reduced over.
KINDS = {(1,): PER_ROW.value, (0,): PER_COLUMN.value, (0, 1): OF_ALL.value}


@triton.jit
def brought_together(value, axis: tl.constexpr, LARGEST: tl.constexpr):
    return tl.max(value, axis) if LARGEST else tl.sum(value, axis)


@triton.jit(do_not_specialize=TOKENS)
def wgrad_measure_kernel(
    dys,
    xs,
    strides,
    tokens_0,
    tokens_1,
    tokens_2,
    tokens_3,
    ends,
    lookups,
    lookup_strides,
    accumulator,
    accumulator_strides,
    multiplier,
    out,
    weight,
    weight_strides,
    scalars,
    factors,
    partials,
    numbers,
    shares,
    O,
    I,
    VALUES: tl.constexpr,
    N_SCALARS: tl.constexpr,
    FACTORS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tokens = (tokens_0, tokens_1, tokens_2, tokens_3)
    row, column = tile_position(O, I, BLOCK_O, BLOCK_I, GROUP)
    tile = gradient_tile(dys, xs, tokens, strides, row, column, O, I, BLOCK_O, BLOCK_I, BLOCK_T, OFFSET, PRECISION)
    if lookups is not None:
        tile = add_lookups(tile, lookups, lookup_strides, row, column, O, I, BLOCK_O, BLOCK_I)
    h = load_scalars(scalars, N_SCALARS)
    sum_of_squares = 0.0
    sums = ()
    for index in tl.static_range(len(NUMBERS)):
        sums = sums + (tl.zeros((BLOCK_O,), tl.float32) if NUMBERS[index][1] == PER_ROW else 0.0,)
    tiles = column_parts(tile, PARTS)
    WIDTH: tl.constexpr = BLOCK_I // PARTS
    for part in tl.static_range(PARTS):
        g = tiles[part]
        first = column + part * WIDTH
        inside = in_range(row, first, O, I, BLOCK_O, WIDTH)
        if accumulator is not None:
            corner, offset = locate(row, first, accumulator_strides, BLOCK_O, WIDTH, OFFSET)
            g += tl.load(accumulator + corner + offset, mask=inside, other=0.0).to(tl.float32)
        if partials is not None:
            sum_of_squares += tl.sum(g * g)
        if out is not None:
            corner, offset = locate(row, first, (I, 1), BLOCK_O, WIDTH, OFFSET)
            tl.store(out + corner + offset, round_to(g, out.dtype.element_ty), mask=inside)
        if multiplier is not None:
            g *= tl.load(multiplier)
        w = g
        if weight is not None:
            corner, offset = locate(row, first, weight_strides, BLOCK_O, WIDTH, OFFSET)
            w = tl.load(weight + corner + offset, mask=inside, other=0.0).to(tl.float32)
        values = VALUES(g, w, load_factors(h, factors, row, first, O, I, FACTORS, BLOCK_O, WIDTH))
        added = ()
        for index in tl.static_range(len(NUMBERS)):
            value = tl.where(inside, values[NUMBERS[index][0]], 0.0)
            if LARGEST:
                # A maximum passes over NaN.
                value = tl.where(value == value, value, float("inf"))
            if NUMBERS[index][1] == PER_ROW:
                own = brought_together(value, 1, LARGEST)
                added = added + (tl.maximum(sums[index], own) if LARGEST else sums[index] + own,)
            elif NUMBERS[index][1] == PER_COLUMN:
                columns = first + tl.arange(0, WIDTH)
                own = brought_together(value, 0, LARGEST) * shares[index]
                tl.store(numbers[index] + (row // BLOCK_O).to(tl.int64) * I + columns, own, mask=columns < I)
                added = added + (0.0,)
            else:
                own = brought_together(brought_together(value, 1, LARGEST), 0, LARGEST)
                added = added + (tl.maximum(sums[index], own) if LARGEST else sums[index] + own,)
        sums = added
    for index in tl.static_range(len(NUMBERS)):
        if NUMBERS[index][1] == PER_ROW:
            rows = row + tl.arange(0, BLOCK_O)
            place = numbers[index] + (column // BLOCK_I).to(tl.int64) * O + rows
            tl.store(place, sums[index] * shares[index], mask=rows < O)
        elif NUMBERS[index][1] == OF_ALL:
            tl.store(numbers[index] + tl.program_id(0), sums[index] * shares[index])
    if partials is not None:
        tl.store(partials + tl.program_id(0), sum_of_squares)


def measures(reading: Reading) -> bool:
    """Whether :func:`measure` takes them: those of a matrix, or of a vector, which is a row of one."""
    dims = len(reading.shape)
    return dims == 1 or (dims == 2 and all(each in KINDS for _, each in reading.over))


def steps(slot: Slot) -> bool:
    """Whether :func:`measured_step` takes a weight."""
    if slot.weight.dim() == 1:
        # Random bits and blocks of a piece of a matrix are counted along that matrix's rows.
        return slot.noise is None and not slot.is_scaled and all(t.is_contiguous() for _, t in slot.tensors())
    return slot.weight.dim() == 2 and has_shared_strides(slot)


def measured_step(slot: Slot, gradient: Tensor, multiplier: Tensor | None, factors: Sequence[Tensor]) -> None:
    """Launch the step of one weight from a gradient in memory; see :func:`fused.measured_step`."""
    if slot.weight.dim() == 1:
        slot, gradient, factors = _row_of(slot), gradient.view(1, -1), [factor.view(1, -1) for factor in factors]
    noise = None if slot.noise is None else slot.noise.words.data_ptr()
    key = "step", slot.rule, noise, *_alignment(gradient, multiplier, factors)
    again = slot.memo.get(key)
    changing = {"accumulator": gradient, "multiplier": multiplier, "factors": tuple(factors)}
    changing = {name: each for name, each in changing.items() if each is not None}
    if again is not None:
        again(*changing.values())
        return
    written = [tensor for _, tensor in slot.tensors()]
    launch = Launch((), gradient, *slot.weight.shape, written, noisy=slot.noise is not None, scaled=slot.is_scaled)
    positional, constants = step_arguments(slot, launch, shared_strides(slot), multiplier, None, factors, None)
    slot.memo[key] = launched(wgrad_step_kernel, launch.grid, positional, constants, list(changing))


def _alignment(gradient: Tensor, multiplier: Tensor | None, factors: Sequence[Tensor]) -> tuple:
    """What a launch that is remembered must find again of operands that come to lie elsewhere."""
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    return layout(gradient), scaled, *(factor.data_ptr() % 16 for factor in factors)


def _row_of(slot: Slot) -> Slot:
    """A vector's slot as that of a matrix with one row; kept by ``slot``."""
    row = slot.memo.get("row of a matrix")
    if row is None:
        master = None if slot.master is None else slot.master.view(1, -1)
        states = tuple(state.view(1, -1) for state in slot.states)
        row = replace(slot, weight=slot.weight.detach().view(1, -1), master=master, states=states)
        slot.memo["row of a matrix"] = row
    row.rule, row.scalars = slot.rule, slot.scalars
    return row


def _of_row(reading: Reading) -> Reading:
    """A vector's reading as that of a matrix with one row."""
    return replace(
        reading,
        over=tuple((index, (0, *(dim + 1 for dim in dims))) for index, dims in reading.over),
        shape=torch.Size((1, *reading.shape)),
        weight=None if reading.weight is None else reading.weight.view(1, -1),
        factors=[factor.view(1, -1) for factor in reading.factors],
    )


def measure(
    reading: Reading, segments, accumulator: Tensor | None, multiplier: Tensor | None, out: Tensor | None
) -> list[Tensor]:
    """Launch one measure of a gradient, on operands that the caller checked; see :func:`fused.measure`."""
    if len(reading.shape) == 1:
        flat = [None if each is None else each.view(1, -1) for each in (accumulator, out)]
        return [number.view(-1) for number in measure(_of_row(reading), segments, flat[0], multiplier, flat[1])]
    if segments:
        return _Walk(reading, segments, accumulator, out)(reading, accumulator, multiplier)
    key = "measure", reading.values, reading.norm_sq is None, *_alignment(accumulator, multiplier, reading.factors)
    walk = reading.memo.get(key)
    if walk is not None:
        return walk(reading, accumulator, multiplier)
    walk = _Walk(reading, (), accumulator, None)
    numbers = walk(reading, accumulator, multiplier)
    if walk.again is not None:
        reading.memo[key] = walk
    return numbers


class _Walk:
    """One measure of one weight's gradient.

    Where that is in memory it may be called again: it, the multiplier and the factors change from call to call.
    """

    def __init__(self, reading: Reading, segments, accumulator: Tensor | None, out: Tensor | None):
        self.shape = rows, columns = reading.shape
        written = [tensor for tensor in (out, reading.weight) if tensor is not None]
        self.launch = launch = Launch(segments, accumulator, rows, columns, written)
        self.out = out
        self.kinds = [KINDS[dims] for _, dims in reading.over]
        tiles = (
            triton.cdiv(rows, launch.options["BLOCK_O"]),
            triton.cdiv(columns, launch.options["BLOCK_I"]),
        )
        #: Of each tile's numbers, by kind; those of the whole matrix share one tensor, and one sum.
        self.tiles = {PER_ROW.value: (tiles[1], rows), PER_COLUMN.value: (tiles[0], columns)}
        self.of_all = self.kinds.count(OF_ALL.value), launch.grid[0]
        self.partials = None if reading.norm_sq is None else launch.partials(reading.scalars.device)
        self.again = None

    def __call__(self, reading: Reading, gradient: Tensor | None, multiplier: Tensor | None) -> list[Tensor]:
        made = {"dtype": torch.float32, "device": reading.scalars.device}
        of_all = torch.empty(self.of_all, **made)
        unused = iter(of_all.unbind())
        numbers = tuple(
            next(unused) if kind == OF_ALL.value else torch.empty(self.tiles[kind], **made) for kind in self.kinds
        )
        if self.again is not None:
            scaled = () if multiplier is None else (multiplier,)
            self.again(gradient, *scaled, tuple(reading.factors), numbers)
        elif self.launch.grid[0]:
            self._first(reading, gradient, multiplier, numbers)
        if self.partials is not None:
            add_up(reading.norm_sq, self.partials, reading.late_norms)
        rows, columns = self.shape
        together = iter(())
        if of_all.shape[0]:
            together = iter(_together(of_all, 1, reading.largest).view(-1, 1, 1).unbind())
        shapes = {PER_ROW.value: (rows, 1), PER_COLUMN.value: (1, columns)}
        return [
            next(together) if kind == OF_ALL.value else _together(each, 0, reading.largest).view(shapes[kind])
            for kind, each in zip(self.kinds, numbers, strict=True)
        ]

    def _first(self, reading: Reading, gradient: Tensor | None, multiplier: Tensor | None, numbers: tuple) -> None:
        launch, weight = self.launch, reading.weight
        positional = (
            *launch.operands,
            multiplier,
            self.out,
            weight,
            None if weight is None else weight.stride(),
            reading.scalars,
            tuple(reading.factors),
            self.partials,
            numbers,
            reading.shares,
            *self.shape,
        )
        constants = {
            "VALUES": compiled(reading.values),
            "N_SCALARS": reading.scalars.numel(),
            "FACTORS": kinds_of(reading.factors),
            "NUMBERS": tuple((index, kind) for (index, _), kind in zip(reading.over, self.kinds, strict=True)),
            "LARGEST": reading.largest,
            "PARTS": launch.parts,
            "maxnreg": launch.maxnreg,
            **launch.options,
        }
        changing = ["accumulator", *(() if multiplier is None else ("multiplier",)), "factors", "numbers"]
        again = launched(wgrad_measure_kernel, launch.grid, positional, constants, changing)
        # Segments are the launch's own, and a new number of tokens with each batch.
        if gradient is not None and self.out is None:
            self.again, launch.operands = again, ()


def _together(tiles: Tensor, dim: int, largest: bool) -> Tensor:
    if tiles.shape[dim] == 1:
        return tiles.squeeze(dim)
    # A rank may have no rows.
    return tiles.amax(dim) if largest and tiles.shape[dim] else tiles.sum(dim)
