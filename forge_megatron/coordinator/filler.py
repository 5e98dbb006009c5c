"""Fills a list of buckets in order, as far as gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from torch import Tensor

from forge_megatron.coordinator.bucket import Bucket, Piece, Place
from forge_megatron.coordinator.gathered import copy
from forge_megatron.coordinator.gradients import LocalGradient, StoredGradient
from forge_megatron.coordinator.pipeline import Pipeline, Route

Gradient = LocalGradient | StoredGradient


class Filler:
    """A position in a list of buckets.

    Args:
        buckets: in the order in which they are sent.
        parts: stretches of each.
        gradient: a parameter's gradient on this rank.
        written: told when the last piece of a parameter has been written: its gradient may go.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parts: int,
        gradient: Callable[[Tensor], Gradient],
        written: Callable[[Tensor], None],
    ):
        self.pieces: list[Piece] = [piece for bucket in buckets for piece in bucket.pieces]
        self.params: set[Tensor] = {piece.param for piece in self.pieces}
        self._buckets = buckets
        self._parts = parts
        self._gradient = gradient
        self._written = written
        self._bucket = self._piece = self._passed = 0
        # The bucket that is being filled: its memory, as its elements, and where each piece lies.
        self._buffer: Tensor | None = None
        self._elements: Tensor | None = None
        self._places: Sequence[Place] = ()
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def next_param(self) -> Tensor | None:
        """Whose turn it is; None at the end."""
        return self.pieces[self._passed].param if self._passed < len(self.pieces) else None

    @property
    def sent(self) -> set[Tensor]:
        """The parameters of which a piece is in a bucket that was launched."""
        return {piece.param for bucket in self._buckets[: self._bucket] for piece in bucket.pieces}

    def advance(
        self,
        pipeline: Pipeline,
        route: Callable[[Bucket, Tensor], Route],
        ready: Set[Tensor],
        in_hand: Gradient | None = None,
        *,
        closing: bool = False,
        everything: bool = False,
    ) -> None:
        """Fills and launches buckets up to the first parameter that is not ready.

        Args:
            pipeline: gives buffers and runs routes.
            route: of a full bucket.
            ready: the parameters whose gradients are there.
            in_hand: the gradient of the parameter whose turn it is.
            closing: whatever is not ready is not coming, and its place is zero.
            everything: buckets without any of ``ready`` are sent too; otherwise every rank knows to leave them out.
        """
        while self._passed < len(self.pieces):
            bucket = self._buckets[self._bucket]
            if closing and not everything and self._piece == 0 and not bucket.params() & ready:
                self._bucket, self._passed = self._bucket + 1, self._passed + len(bucket.pieces)
                continue
            piece = bucket.pieces[self._piece]
            if piece.param not in ready and not closing:
                return
            if self._buffer is None:
                self._buffer = pipeline.take()
                self._elements = bucket.elements(self._buffer, self._parts, bucket.dtype)
                self._places = bucket.places(self._elements, self._parts)
            if in_hand is None:
                in_hand = self._gradient(piece.param) if piece.param in ready else StoredGradient(None)
            place = self._places[self._piece]
            for rows, there in place.rows:
                in_hand.write(rows, there, self._copies)
            for there in place.spare:
                there.zero_()
            self._piece, self._passed = self._piece + 1, self._passed + 1
            if self.next_param is not piece.param:
                in_hand = None
                if piece.param in ready:
                    self._written(piece.param)
            if self._piece == len(bucket.pieces):
                buffer, self._buffer = self._buffer, None
                self._bucket, self._piece = self._bucket + 1, 0
                copy(self._copies)
                self._copies.clear()
                bucket.mark(self._elements, [other.param in ready for other in bucket.pieces])
                pipeline.launch(route(bucket, buffer), buffer)
