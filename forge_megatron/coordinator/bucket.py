"""How partial gradients lie in buckets: the options, and the layout, which is the same on every rank.

A bucket is ``parts`` equal stretches of one buffer. Replicated weights have one part, in which each piece of
a weight is contiguous. Under sharded states there is a part for each rank, in the order of a reduce-scatter:
it holds that rank's rows of every weight in the bucket.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forge_megatron.formats.code import BLOCK

#: Elements that each piece's start is a multiple of: vector accesses of 16 bytes in every dtype.
ALIGNMENT = 16

#: Bytes of a bucket of no given size: one of so many of a model's gradients, and its limits.
SHARE, LEAST, MOST = 32, 1 << 20, 256 << 20

WIRE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Buckets:
    """How gradients that are partial over ranks are summed (:func:`forge_megatron.attach`'s ``buckets=``).

    Attributes:
        nbytes: of one bucket; None: a thirty-second of all gradients, at most 256 MiB, as each bucket costs the host a
            fixed time. A weight that is larger is sent in chunks of rows; one row is never cut, nor 64
            coordinates of a vector that may share a scale, nor a weight whose rule reads more of it than one
            coordinate, for which every bucket has room.
        count: buckets in turn: one is being filled while others are on the wire or being stepped.
        wire_dtype: float32 or bfloat16; None: bfloat16 for a bfloat16 weight, float32 for others, which is what
            ``DistributedDataParallel`` sends.
        average: the mean over the ranks, as ``DistributedDataParallel``; False: the sum.
        deterministic: add in the order of the ranks, in fp32, whatever the bucket's size. Otherwise the order is the
            library's, which for more than two ranks may change with the size; replicas are bit-equal either way.
        timeout: seconds after which a rank that the others wait for is an error.
    """

    nbytes: int | None = None
    count: int = 3
    wire_dtype: torch.dtype | None = None
    average: bool = True
    deterministic: bool = False
    timeout: float = 120.0

    def __post_init__(self):
        for name, least in (("nbytes", 1), ("count", 2)):
            value = getattr(self, name)
            if name == "nbytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"buckets: {name}={value!r}; give a whole number of at least {least}")
        if self.wire_dtype not in (None, *WIRE_DTYPES):
            raise ValueError(f"buckets: wire_dtype={self.wire_dtype}; give torch.float32, torch.bfloat16 or None")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"buckets: timeout={self.timeout!r}; give a number of seconds above 0")

    def wire(self, p: Tensor) -> torch.dtype:
        """What the gradient of ``p`` travels in."""
        if self.wire_dtype is not None:
            return self.wire_dtype
        return torch.bfloat16 if p.dtype is torch.bfloat16 else torch.float32

    def sized(self, params: Iterable[Tensor]) -> Buckets:
        """The same with a size, for a model of ``params``."""
        if self.nbytes is not None:
            return self
        total = sum(p.numel() * self.wire(p).itemsize for p in params)
        return replace(self, nbytes=min(max(total // SHARE, LEAST), MOST))


def extent(p: Tensor) -> int:
    """Rows of ``p``: its first dimension; a 0-dim tensor is one row."""
    return p.shape[0] if p.dim() else 1


def columns(p: Tensor) -> int:
    return math.prod(p.shape[1:])


def unit_rows(p: Tensor) -> int:
    """Rows of ``p`` that are never parted: a vector's coordinates that may share a scale."""
    return BLOCK if p.dim() == 1 else 1


def share_of(p: Tensor, parts: int) -> int:
    """Rows of ``p`` in each of ``parts`` but the last ones (``torch.chunk``'s, and DTensor's ``Shard(0)``)."""
    return _share(extent(p), unit_rows(p), parts)


def _share(extent: int, unit: int, parts: int) -> int:
    return min(round_up(-(-extent // parts), unit), extent)


def part_rows(p: Tensor, parts: int, part: int) -> slice:
    """The rows of ``p`` that belong to one of ``parts``."""
    return _rows(extent(p), unit_rows(p), parts, part, 0, extent(p))


@functools.lru_cache(maxsize=1 << 16)
def _rows(extent: int, unit: int, parts: int, part: int, first: int, end: int) -> slice:
    """Rows ``first`` to ``end`` of one part, as the weight's own: asked twice a piece and step."""
    share = _share(extent, unit, parts)
    start, stop = min(part * share, extent), min((part + 1) * share, extent)
    return slice(min(start + first, stop), min(start + end, stop))


def rows_of(tensor: Tensor, rows: slice) -> Tensor:
    """A view of some rows, outside autograd and with a version counter of its own: the caller bumps the weight's."""
    tensor = tensor.data
    return (tensor if tensor.dim() else tensor.view(1))[rows]


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows of one weight in one bucket.

    Attributes:
        param: the weight.
        first, end: the rows of every part's share of it.
        offset: where they start in a part, in elements.
    """

    param: Tensor
    first: int
    end: int
    offset: int

    def rows(self, parts: int, part: int) -> slice:
        """The weight's own rows in one part; fewer than ``end - first``, or none, at the weight's end."""
        return _rows(extent(self.param), unit_rows(self.param), parts, part, self.first, self.end)

    def view(self, part: Tensor, rows: slice) -> Tensor:
        """``rows`` as they lie in ``part``, a flat stretch of the bucket; shaped as those rows of the weight."""
        count = rows.stop - rows.start
        held = part.narrow(0, self.offset, count * columns(self.param))
        return held.view(count, *self.param.shape[1:])


class Place(NamedTuple):
    """Where a piece lies in a buffer.

    Attributes:
        rows: those of the weight in each part that has any, and the stretch that they take, in the weight's shape.
        spare: what no row takes, at the weight's end.
    """

    rows: list[tuple[slice, Tensor]]
    spare: list[Tensor]

    @classmethod
    def of(cls, piece: Piece, stretches: Sequence[Tensor]) -> Place:
        """Args:
        stretches: of each part, in the order of the parts.
        """
        place = cls([], [])
        end = piece.offset + (piece.end - piece.first) * columns(piece.param)
        for part, stretch in enumerate(stretches):
            rows = piece.rows(len(stretches), part)
            if rows.stop > rows.start:
                place.rows.append((rows, piece.view(stretch, rows)))
            begin = piece.offset + (rows.stop - rows.start) * columns(piece.param)
            if begin < end:
                place.spare.append(stretch[begin:end])
        return place


@dataclass(frozen=True)
class Bucket:
    """What one buffer holds.

    Attributes:
        pieces: in the order of their offsets.
        flags: where a part has one element for each piece, above 0 after the sum if any rank had a gradient.
        length: of one part, in elements.
        dtype: on the wire.
        memo: what is kept of it from step to step.
    """

    pieces: tuple[Piece, ...]
    flags: int
    length: int
    dtype: torch.dtype
    memo: dict = field(default_factory=dict, repr=False)

    def places(self, elements: Tensor, parts: int) -> list[Place]:
        """Where each piece lies in ``elements``, which is all of the bucket."""
        key = "gradients", elements.data_ptr()
        if key not in self.memo:
            stretches = elements.view(parts, self.length).unbind()
            self.memo[key] = [Place.of(piece, stretches) for piece in self.pieces]
        return self.memo[key]

    def params(self) -> set[Tensor]:
        return {piece.param for piece in self.pieces}

    def mark(self, elements: Tensor, present: Sequence[bool]) -> None:
        """Writes the flags of every part."""
        parts = elements.view(-1, self.length)[:, self.flags :]
        if all(present):
            parts.fill_(1.0)
        else:
            parts.zero_()[:, : len(present)] = torch.tensor(present, dtype=self.dtype, device=elements.device)

    def marked(self, part: Tensor) -> list[bool]:
        """Of each piece, whether any rank had a gradient; waits for the device."""
        return [flag > 0 for flag in part[self.flags : self.flags + len(self.pieces)].tolist()]

    def elements(self, buffer: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
        """What it takes of a uint8 buffer."""
        return buffer[: parts * self.length * dtype.itemsize].view(dtype)


def _width(p: Tensor, options: Buckets, gathered: bool) -> int:
    """Bytes of an element of ``p`` in a bucket; codes with their scales are no whole number of them."""
    wire = options.wire(p).itemsize
    return max(wire, -(-p.nbytes // max(1, p.numel()))) if gathered else wire


def _capacity(p: Tensor, size: int, options: Buckets, parts: int, uncut: Container[Tensor]) -> int:
    """Elements of a part of a bucket that ``p`` is put in."""
    least = share_of(p, parts) if p in uncut else min(unit_rows(p), share_of(p, parts))
    return max(options.nbytes // (size * parts), least * columns(p))


def cut(
    params: Iterable[Tensor],
    options: Buckets,
    parts: int,
    *,
    multiple: int = 1,
    gathered: bool,
    uncut: Container[Tensor] = (),
) -> list[Bucket]:
    """Lays out the gradients of ``params``, in this order.

    Args:
        params: distinct weights of any shapes.
        options: wire dtype, and a size (:meth:`Buckets.sized`).
        parts: stretches of a bucket.
        multiple: a bucket is a multiple of this many elements.
        gathered: the buffer holds the weights too, after their step, each in no more bytes than its gradient takes.
        uncut: those that lie in one bucket, whatever its size.

    Returns:
        The buckets; nothing for weights without elements.
    """
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used, dtype, alike = 0, None, None
    unit = math.lcm(ALIGNMENT, multiple)

    def close() -> None:
        nonlocal pieces, used
        if pieces:
            buckets.append(Bucket(tuple(pieces), used, round_up(used + len(pieces), unit), dtype))
        pieces, used = [], 0

    for p in params:
        if p.numel() == 0:
            continue
        wire = options.wire(p)
        size = _width(p, options, gathered)
        capacity = _capacity(p, size, options, parts, uncut)
        share = share_of(p, parts)
        if (wire, size) != alike or used + share * columns(p) > capacity:
            close()
        alike = dtype, _ = wire, size
        at_most = max(capacity // columns(p) // unit_rows(p), 1) * unit_rows(p)
        for first in range(0, share, at_most):
            if first:
                close()
            end = min(first + at_most, share)
            pieces.append(Piece(p, first, end, used))
            used = round_up(used + (end - first) * columns(p), unit)
    close()
    return buckets


def buffer_bytes(
    params: Iterable[Tensor],
    options: Buckets,
    parts: int,
    *,
    multiple: int = 1,
    gathered: bool,
    uncut: Container[Tensor] = (),
) -> int:
    """Of one buffer that can hold each bucket of any selection of ``params``."""
    unit = math.lcm(ALIGNMENT, multiple)
    params = list(params)
    largest = total = 0
    for p in params:
        size = _width(p, options, gathered)
        capacity = _capacity(p, size, options, parts, uncut)
        filled = round_up(capacity, unit)
        largest = max(largest, size * parts * (filled + round_up(filled // unit, unit)))
        total += size * parts * round_up(share_of(p, parts) * columns(p), unit)
    return min(largest, total + parts * 4 * round_up(len(params), unit))


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
