"""Which random bits the stochastic rounding of a weight takes.

The bits of a coordinate are word ``column % 4`` of Philox4x32-10 with

- the key: 64 bits of BLAKE2b of (version, seed, the weight's name, step), made on the host when the
  scalars of a step are, and read from device memory, so that a captured graph follows;
- the counter: ``column // 4`` (64 bits) and ``row`` (64 bits) in the *whole* weight, whose row is all
  dimensions but the last.

Equal on replicas, on any tiling and sharding, on CPU and GPU; another each step; the same after a resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..rules.bind import torch_language as tl
from .philox import GROUP, counter_words, philox

#: Of all of the above: a checkpoint says which bits its run went on with.
VERSION = 1

#: A row that no weight has.
_NEVER = 2**62


@dataclass(frozen=True)
class Origin:
    """A weight's name and the place of this process's part in the whole weight.

    Attributes:
        name: the same in every run and on every rank: without wrapper prefixes, layers numbered globally.
        row, column: of the part's first coordinate.
        split: the part's row from which on rows lie ``jump`` further down in the whole weight: a rank's
            halves of SwiGLU's first linear are apart there.
        start: the first coordinate, counted along the rows, where the part is a flat piece of a matrix.
        columns: of that matrix; None: the part's own last dimension.
    """

    name: str
    row: int = 0
    column: int = 0
    split: int = _NEVER
    jump: int = 0
    start: int = 0
    columns: int | None = None


@dataclass(frozen=True)
class Noise:
    """Where the kernels read a weight's random bits.

    Attributes:
        words: int64 ``[7]`` on the weight's device: key, row, column, split, jump, start, columns.
        origin: what they were made of.
        columns: of a matrix of which the weight is a part.
    """

    words: Tensor
    origin: Origin
    columns: int

    def below(self, rows: int, before: Noise | None = None) -> Noise:
        """Of the part without its first ``rows`` rows, for this step: its words are a copy.

        Args:
            before: the last step's, whose words are written over: launches remember where they are.
        """
        words = self.words.clone() if before is None else before.words.copy_(self.words)
        words[1] += rows
        words[3] -= rows
        origin = replace(self.origin, row=self.origin.row + rows, split=self.origin.split - rows)
        return replace(self, words=words, origin=origin)

    def after(self, coordinates: int) -> Noise:
        """Of the part without its first ``coordinates``, along its rows, for this step: its words are a copy."""
        if not coordinates:
            return self
        words = self.words.clone()
        words[5] += coordinates
        return replace(self, words=words, origin=replace(self.origin, start=self.origin.start + coordinates))

    @property
    def is_grouped(self) -> bool:
        """Whether four coordinates side by side in memory, from each fourth on, are a group of the whole."""
        return self.origin.start % GROUP == 0 and self.columns % GROUP == 0 and self.row_is_grouped

    @property
    def row_is_grouped(self) -> bool:
        """The same within a row of the part."""
        return self.origin.column % GROUP == 0


def key(seed: int, name: str, step: int) -> int:
    """The Philox key of one weight's step, as a signed 64-bit integer."""
    text = f"forge_megatron stochastic rounding {VERSION}\0{seed}\0{name}\0{step}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def words(origin: Origin, columns: int, seed: int, step: int) -> tuple[int, ...]:
    """The row of a :class:`Noise`."""
    where = (origin.row, origin.column, origin.split, origin.jump, origin.start)
    return (key(seed, origin.name, step), *where, columns)


#: Length of a row.
WORDS = 7


def columns_of(shape: torch.Size, origin: Origin) -> int:
    """The last dimension of the matrix of which ``origin`` places a part of ``shape``; 1 for a scalar."""
    if origin.columns is not None:
        return origin.columns
    return shape[-1] if shape else 1


def random_bits(noise: Noise, first: int, count: int) -> Tensor:
    """The bits of ``count`` coordinates from the part's coordinate ``first`` on, along its rows.

    Returns:
        int64 ``[count]`` with values below 2^32, on the device of the noise.
    """
    origin, device = noise.origin, noise.words.device
    first += origin.start
    row = first // noise.columns
    rows = torch.arange(row, -(-(first + count) // noise.columns), device=device)
    begin = first - row * noise.columns
    rows = rows + origin.row + torch.where(rows >= origin.split, origin.jump, 0)
    group = origin.column // GROUP
    groups = torch.arange(group, -(-(origin.column + noise.columns) // GROUP), device=device)
    called = philox(*counter_words(groups), *counter_words(rows[:, None]), *counter_words(noise.words[0]))
    shift = origin.column - group * GROUP
    bits = torch.stack(called, -1).flatten(1)[:, shift : shift + noise.columns]
    return bits.flatten()[begin : begin + count]


def word_of(called, column):
    """The word of ``philox``'s four that belongs to a column of the whole weight."""
    lane = column & 3
    return tl.where(lane == 0, called[0], tl.where(lane == 1, called[1], tl.where(lane == 2, called[2], called[3])))
