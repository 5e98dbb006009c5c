"""A dY that never exists whole: it is formed for some rows of the weight at a time, and those rows are stepped from it.

The head of a language model has one: its dY is as large as the logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .grouped_rows import GroupedRows
from .lookups import Ascending, is_lookup
from .slot import Segment, Slot


class FormedRows(ABC):
    """The dY ``[T, O]`` of a segment, formed by blocks of the weight's rows.

    Attributes:
        shape: ``[T, O]``.
        block: rows to be formed at a time; a multiple of 16, so that every block is aligned as the weight is.
    """

    shape: torch.Size
    block: int

    @abstractmethod
    def columns(self, rows: slice) -> Tensor:
        """``dY[:, rows]``, which belongs to the caller.

        Each step, norm or sum asks for every block once, from the first row to the last, before it writes
        that block of the weight.
        """

    @abstractmethod
    def keep(self, x: Tensor) -> None:
        """The segment's X is kept to a later step as ``x``, equal to the one that was given."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Changes when what the rows are formed from is written."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are held besides X."""


def is_blocked(segments: Sequence[Segment]) -> bool:
    return any(isinstance(dy, FormedRows) for dy, _ in segments)


def row_blocks(segments: Sequence[Segment], rows: int) -> Iterator[tuple[slice, list[Segment]]]:
    """Blocks of the weight's rows, each with the segments of its part of the gradient."""
    block = min(dy.block for dy, _ in segments if isinstance(dy, FormedRows))
    lookups = Ascending.of([segment for segment in segments if is_lookup(segment)])
    segments = [*(segment for segment in segments if not is_lookup(segment)), *lookups]
    for start in range(0, rows, block):
        part = slice(start, min(start + block, rows))
        yield part, [of_rows(segment, part) for segment in segments]


def of_rows(segment: Segment, rows: slice) -> tuple[Tensor, Tensor]:
    """The segment of some rows of the weight: ids of others are no row then."""
    first, second = segment
    if isinstance(first, GroupedRows):
        return first.of_experts(rows), second
    if isinstance(first, FormedRows):
        return first.columns(rows), second
    if isinstance(segment, Ascending):
        return Ascending((first - rows.start, second))
    return (first - rows.start if is_lookup(segment) else first[:, rows]), second


def at(slot: Slot, index: slice | int) -> Slot:
    """``slot`` for what ``index`` picks along its first dimension, in the same memory; without its noise."""
    return replace(
        slot,
        weight=slot.weight.detach()[index],
        states=tuple(state[index] for state in slot.states),
        scales=tuple(scale[index] for scale in slot.scales),
        weight_scale=None if slot.weight_scale is None else slot.weight_scale[index],
        master=None if slot.master is None else slot.master[index],
        noise=None,
        late_norms=None,
        update_norm_sq=None,
    )


def slot_of(slot: Slot, rows: slice, norm_sq: Tensor | None) -> Slot:
    """``slot`` for some of its rows, in the same memory; kept by ``slot``, for its launches remember much."""
    if slot.rule.on_scratch:
        return replace(at(slot, rows), norm_sq=norm_sq)
    key = "rows", rows.start, rows.stop, norm_sq is None
    if key not in slot.memo:
        slot.memo[key] = at(slot, rows)
    part = slot.memo[key]
    part.rule = slot.rule
    part.norm_sq = norm_sq
    part.noise = None if slot.noise is None else slot.noise.below(rows.start, part.noise)
    return part


def step_by_rows(
    slot: Slot, parts: Iterable[tuple[slice, list[Segment]]], step: Callable[[Slot, slice, list[Segment]], None]
) -> None:
    """Step some rows of a weight after others; ``slot.norm_sq`` is the sum over them.

    Args:
        parts: rows, and the segments of their part of the gradient.
        step: steps the slot of these rows.
    """
    norms = []
    for rows, segments in parts:
        if slot.norm_sq is not None:
            norms.append(torch.empty_like(slot.norm_sq))
        step(slot_of(slot, rows, norms[-1] if norms else None), rows, segments)
    if norms:
        slot.norm_sq.data.copy_(torch.stack(norms).sum(dtype=torch.float64))
