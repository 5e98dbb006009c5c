"""The whole weight, as a matrix stage sees it that runs on a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: What a part's entries were reduced to, with ``keepdim``, and over which dimensions.
Reduced = tuple[Tensor, tuple[int, ...]]


class Whole:
    """What a rule asks about a weight beyond its own coordinates. This one has all of it, and asks nobody.

    A subclass has a shard, and asks the ranks that have the others: every method that is given tensors of several
    ranks is a collective, and gives every rank the same bits. The statistics of a rule are whole on every rank.
    """

    def shape(self, x: Tensor) -> torch.Size:
        """Of the whole tensor of which ``x`` is the part."""
        return x.shape

    def norms(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The 2-norm of all entries of each whole tensor, 0-dim fp32."""
        return [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors]

    def sums(self, *reduced: Reduced) -> Sequence[Tensor]:
        """Whole sums from those of the parts."""
        return [x for x, _ in reduced]

    def maxima(self, *reduced: Reduced) -> Sequence[Tensor]:
        """Whole maxima, of what is not negative, from those of the parts; not finite where an entry is not."""
        return [x for x, _ in reduced]

    def part(self, statistic: Tensor) -> Tensor:
        """What belongs to the part of a whole statistic, which has the weight's dimensions, some of extent 1."""
        return statistic

    def cut(self, x: Tensor, dim: int, *, of: int) -> Tensor:
        """What belongs to the part of ``x``, whose dimension ``dim`` is the whole weight's dimension ``of``."""
        return x

    def gathered(self, part: Tensor) -> Tensor:
        """The whole of ``part``, whose leading dimensions are a batch, on every rank."""
        return part

    def transform(self, u: Tensor, function: Callable[[Tensor], Tensor], reads: torch.dtype) -> Tensor:
        """``function`` of the whole tensor, fp32, or rather the part of it.

        Args:
            u: fp32; leading dimensions are a batch. It may be written to.
            function: of its argument alone, to which it may write, and return it. One object wherever it does the
                same, by which a CUDA graph of it is found.
            reads: what ``function`` rounds its argument to before anything else.
        """
        return function(u)


#: Of every weight that lies on one rank.
WHOLE = Whole()
