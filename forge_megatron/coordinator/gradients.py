"""A rank's own part of a gradient, wherever it lies: kept factors, an accumulator, ``.grad``, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forge_megatron import kernels
from forge_megatron.coordinator.bucket import extent
from forge_megatron.linear import OwnedWeight


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def summed_before(owned: OwnedWeight) -> Tensor | None:
    """Folded factors, and what plain consumers put into ``.grad``."""
    grad = owned.weight.grad
    if grad is None:
        return owned.factors.accumulator
    grad = dense(grad).float()
    return grad if owned.factors.accumulator is None else grad + owned.factors.accumulator


class LocalGradient:
    """The gradient ``[O, I]`` of one owned weight on this rank.

    Args:
        owned: the weight.
        segments: its complete factors; None: those that it keeps.
        backend: of the kernels.
    """

    def __init__(self, owned: OwnedWeight, segments: Sequence[kernels.Segment] | None, backend: str):
        self._segments = owned.factors.segments if segments is None else segments
        self._accumulator = summed_before(owned)
        self._backend = backend
        self._extent = extent(owned.weight)
        self._block = min((dy.block for dy, _ in self._segments if isinstance(dy, kernels.FormedRows)), default=None)

    def write(self, rows: slice, out: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Writes some of its rows, rounded once; nothing is left to copy."""
        if self._block is None:
            self._write(rows, out)
            return
        for start in range(rows.start, rows.stop, self._block):
            part = slice(start, min(start + self._block, rows.stop))
            self._write(part, out[part.start - rows.start : part.stop - rows.start])

    def _write(self, rows: slice, out: Tensor) -> None:
        segments, accumulator = self._segments, self._accumulator
        if rows.stop - rows.start < self._extent:
            segments = [kernels.of_rows(segment, rows) for segment in segments]
            accumulator = None if accumulator is None else accumulator[rows]
        kernels.wgrad(segments, out, accumulator=accumulator, backend=self._backend)


class StoredGradient:
    """A gradient that autograd wrote to ``.grad``; None: this rank's part of it is zero."""

    def __init__(self, grad: Tensor | None):
        self._grad = None if grad is None else dense(grad)

    def write(self, rows: slice, out: Tensor, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Some of its rows; ``copies`` receives what is to be copied, to the first of each pair."""
        if self._grad is None:
            out.zero_()
        else:
            copies.append((out, (self._grad if self._grad.dim() else self._grad.view(1))[rows]))
