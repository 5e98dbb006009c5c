"""A rank's own part of a gradient, wherever it lies: kept factors, an accumulator, ``.grad``, or nowhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forge_megatron import kernels
from forge_megatron.coordinator.bucket import Bucket, Piece, columns
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

    def write(self, rows: slice, out: Tensor) -> None:
        """Some of its rows, rounded once."""
        block = min((dy.block for dy, _ in self._segments if isinstance(dy, kernels.FormedRows)), default=None)
        for start in range(rows.start, rows.stop, block or rows.stop - rows.start):
            part = slice(start, min(start + block, rows.stop) if block else rows.stop)
            accumulator = None if self._accumulator is None else self._accumulator[part]
            factors = [kernels.of_rows(segment, part) for segment in self._segments]
            here = out[part.start - rows.start : part.stop - rows.start]
            kernels.wgrad(factors, here, accumulator=accumulator, backend=self._backend)


class StoredGradient:
    """A gradient that autograd wrote to ``.grad``; None: this rank's part of it is zero."""

    def __init__(self, grad: Tensor | None):
        self._grad = None if grad is None else dense(grad)

    def write(self, rows: slice, out: Tensor) -> None:
        if self._grad is None:
            out.zero_()
        else:
            out.copy_((self._grad if self._grad.dim() else self._grad.view(1))[rows])


def fill(buffer: Tensor, bucket: Bucket, piece: Piece, gradient, parts: int) -> None:
    """Writes one piece to its places in ``buffer`` (``parts * bucket.length`` elements of the wire's dtype)."""
    for part, stretch in enumerate(buffer.view(parts, bucket.length)):
        rows = piece.rows(parts, part)
        if rows.stop > rows.start:
            gradient.write(rows, piece.view(stretch, rows))
        missing = piece.end - piece.first - (rows.stop - rows.start)
        if missing:
            end = piece.offset + (piece.end - piece.first) * columns(piece.param)
            stretch[end - missing * columns(piece.param) : end].zero_()
