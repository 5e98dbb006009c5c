"""A rank's shard of a weight whose rule reads all of it: whole norms, statistics and matrices from the ranks' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from forge_megatron.rules.whole import Reduced, Whole

#: ``(first, end)`` along the dimension that is cut.
Stretch = tuple[int, int]


@dataclass(frozen=True)
class Part(Whole):
    """Some stretches along one dimension, on each rank of a group.

    Attributes:
        whole: the shape of the weight.
        dim: the dimension that is cut.
        stretches: of each rank, in the order in which its shard has them; together they are the whole dimension.
        rank: this process's, in the group.
        group: the ranks that have the weight's shards.
        guarded: what each of its collectives runs in, which may say more of one that fails.
    """

    whole: torch.Size
    dim: int
    stretches: tuple[tuple[Stretch, ...], ...]
    rank: int
    group: dist.ProcessGroup
    guarded: Callable[[], AbstractContextManager] = field(default=nullcontext, compare=False)

    def __post_init__(self):
        covered = sorted(stretch for each in self.stretches for stretch in each if stretch[0] < stretch[1])
        ends = [0, *(end for _, end in covered)]
        if [first for first, _ in covered] != ends[:-1] or ends[-1] != self.whole[self.dim]:
            raise ValueError(f"stretches {self.stretches} do not make dimension {self.dim} of {list(self.whole)}")

    def shape(self, x: Tensor) -> torch.Size:
        return self.whole

    def norms(self, *tensors: Tensor) -> Sequence[Tensor]:
        squares = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32).double() for x in tensors]).square_()
        with self.guarded():
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt_().float().unbind()

    def sums(self, *reduced: Reduced) -> Sequence[Tensor]:
        return self._reduced(reduced, dist.ReduceOp.SUM)

    def maxima(self, *reduced: Reduced) -> Sequence[Tensor]:
        # A collective's maximum need not keep NaN.
        finite_or_inf = [(torch.nan_to_num(x, nan=math.inf, posinf=math.inf), dims) for x, dims in reduced]
        return self._reduced(finite_or_inf, dist.ReduceOp.MAX)

    def _reduced(self, reduced: Sequence[Reduced], op: dist.ReduceOp) -> list[Tensor]:
        """One all-reduce of zeros but for this rank's places; what was reduced over the cut dimension is everywhere."""
        shapes = []
        for x, dims in reduced:
            shape = list(x.shape)
            if not self._is_reduced(dims):
                shape[self.dim] = self.whole[self.dim]
            shapes.append(shape)
        sizes = [math.prod(shape) for shape in shapes]
        everything = torch.zeros(sum(sizes), dtype=torch.float32, device=reduced[0][0].device)
        views = [part.view(shape) for part, shape in zip(everything.split(sizes), shapes, strict=True)]
        for view, (x, dims) in zip(views, reduced, strict=True):
            if self._is_reduced(dims):
                view.copy_(x)
            else:
                self._place(view, x, self.rank, self.dim)
        with self.guarded():
            dist.all_reduce(everything, op=op, group=self.group)
        return views

    def _is_reduced(self, dims: tuple[int, ...]) -> bool:
        return self.dim in (dim % len(self.whole) for dim in dims)

    def part(self, statistic: Tensor) -> Tensor:
        if statistic.shape[self.dim] != self.whole[self.dim]:
            return statistic
        return self._of(statistic, self.rank, self.dim)

    def cut(self, x: Tensor, dim: int, *, of: int) -> Tensor:
        return self._of(x, self.rank, dim) if of == self.dim else x

    def _of(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        pieces = [whole.narrow(dim, first, end - first) for first, end in self.stretches[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def _place(self, whole: Tensor, part: Tensor, rank: int, dim: int) -> None:
        at = 0
        for first, end in self.stretches[rank]:
            whole.narrow(dim, first, end - first).copy_(part.narrow(dim, at, end - first))
            at += end - first

    def transform(self, u: Tensor, function: Callable[[Tensor], Tensor], reads: torch.dtype) -> Tensor:
        dim = self.dim - len(self.whole)
        whole = function(self.gathered(u.to(reads)).to(u.dtype))
        at = 0
        for first, end in self.stretches[self.rank]:
            u.narrow(dim, at, end - first).copy_(whole.narrow(dim, first, end - first))
            at += end - first
        return u

    def gathered(self, part: Tensor) -> Tensor:
        dim = self.dim - len(self.whole)
        extents = [sum(end - first for first, end in each) for each in self.stretches]
        sent = part
        if min(extents) < max(extents):
            sent = part.new_zeros(self._with_extent(part, max(extents)))
            sent.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = part.new_empty(len(extents), *sent.shape)
        with self.guarded():
            dist.all_gather_into_tensor(parts.view(-1), sent.contiguous().view(-1), group=self.group)
        whole = part.new_empty(self._with_extent(part, self.whole[self.dim]))
        for rank, each in enumerate(parts):
            self._place(whole, each, rank, dim)
        return whole

    def _with_extent(self, part: Tensor, extent: int) -> list[int]:
        shape = list(part.shape)
        shape[self.dim - len(self.whole)] = extent
        return shape


@dataclass(frozen=True)
class PartOfPart(Whole):
    """A rank's part, ``inner``, of the part that its group has of the weight, ``outer``."""

    outer: Whole
    inner: Part

    def shape(self, x: Tensor) -> torch.Size:
        return self.outer.shape(x)

    def norms(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.outer.norms(*self.inner.norms(*tensors))

    def sums(self, *reduced: Reduced) -> Sequence[Tensor]:
        return self.outer.sums(*self._with_dims(self.inner.sums(*reduced), reduced))

    def maxima(self, *reduced: Reduced) -> Sequence[Tensor]:
        return self.outer.maxima(*self._with_dims(self.inner.maxima(*reduced), reduced))

    def _with_dims(self, values: Sequence[Tensor], reduced: Sequence[Reduced]) -> list[Reduced]:
        return [(value, dims) for value, (_, dims) in zip(values, reduced, strict=True)]

    def part(self, statistic: Tensor) -> Tensor:
        return self.inner.part(self.outer.part(statistic))

    def cut(self, x: Tensor, dim: int, *, of: int) -> Tensor:
        return self.inner.cut(self.outer.cut(x, dim, of=of), dim, of=of)

    def gathered(self, part: Tensor) -> Tensor:
        return self.outer.gathered(self.inner.gathered(part))

    def transform(self, u: Tensor, function: Callable[[Tensor], Tensor], reads: torch.dtype) -> Tensor:
        return self.inner.transform(u, lambda whole: self.outer.transform(whole, function, reads), reads)
