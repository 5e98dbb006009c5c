"""The gradient of an embedding: a segment ``(ids [T], dE [T, I])``, whose dY is the one-hot rows of its ids.

``dYᵀ X`` is then a sum of dE over the tokens of each row. In the order of their ids, the tokens of any
block of rows are neighbours, so a tile of the gradient reads its own tokens and no others, each row's sum
has the order of the tokens, and rows that no token looked up are tiles without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def is_lookup(segment) -> bool:
    """Whether a segment's first factor names rows."""
    ids, _ = segment
    return isinstance(ids, Tensor) and ids.dtype is torch.int64


class Ascending(tuple):
    """A segment of ids that ascend already: its parts, for some rows at a time, are not sorted again."""

    @classmethod
    def of(cls, segments: Sequence[tuple[Tensor, Tensor]]) -> list[Ascending]:
        """All segments of ids as one, if there are any."""
        lookups = Lookups.of(segments)
        return [] if lookups is None else [cls((lookups.ids, lookups.values[lookups.order]))]


@dataclass(frozen=True)
class Lookups:
    """Segments of ids, sorted.

    Attributes:
        ids: int64 ``[T]``, ascending; those outside the weight's rows (``padding_idx``) are no row.
        order: int64 ``[T]``: whose row of ``values`` each is; equal ids keep the order of their tokens.
        values: ``[T, I]``, dE as it came.
    """

    ids: Tensor
    order: Tensor
    values: Tensor

    @classmethod
    def of(cls, segments: Sequence[tuple[Tensor, Tensor]]) -> Lookups | None:
        """All segments of ids as one; None if there is none, or none with tokens."""
        segments = [segment for segment in segments if segment[0].shape[0]]
        if not segments:
            return None
        if len(segments) == 1 and isinstance(segments[0], Ascending):
            ids, values = segments[0]
            return cls(ids, torch.arange(ids.shape[0], device=ids.device), values)
        ids, values = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*segments, strict=True))
        ids, order = torch.sort(ids, stable=True)
        return cls(ids, order, values)

    def starts(self, rows: int, block: int) -> Tensor:
        """Where the tokens of each block of rows begin, and where the last block's end: int32."""
        blocks = -(-rows // block)
        edges = torch.arange(blocks + 1, device=self.ids.device).mul_(block).clamp_(max=rows)
        return torch.searchsorted(self.ids, edges, out_int32=True)

    def add_to(self, grad: Tensor, first: int) -> None:
        """Add the sums of the rows from ``first`` on to ``grad``, fp32 ``[rows, I]``, in the order of the tokens."""
        begin, end = torch.searchsorted(self.ids, self.ids.new_tensor([first, first + grad.shape[0]])).tolist()
        _add(grad, self.ids[begin:end] - first, self.values[self.order[begin:end]])

    def add_all_to(self, grad: Tensor) -> None:
        """:meth:`add_to` all rows, where no id is outside; the host reads nothing."""
        _add(grad, self.ids, self.values[self.order])


def _add(grad: Tensor, rows: Tensor, values: Tensor) -> None:
    if grad.device.type == "cpu":
        grad.index_add_(0, rows, values.float())
    else:
        # On a GPU index_add_ is atomic, and this sorts.
        grad.index_put_((rows,), values.float(), accumulate=True)
