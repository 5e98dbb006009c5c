"""Weights and states on every rank: each bucket is all-reduced and stepped whole.

Where a norm over all gradients comes before the first step, the sums are reduce-scattered, each rank keeps its
part (its share of one gradient, in the wire's dtype), and every bucket is gathered again at ``step()``: the same
bytes on the wire as one all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_megatron.coordinator.bucket import Bucket, columns
from forge_megatron.coordinator.partial import PartialSums
from forge_megatron.coordinator.pipeline import Route


class Replicated(PartialSums):
    """DistributedDataParallel's schedule without its gradients."""

    def route(self, bucket: Bucket, buffer: Tensor, multiplier: Tensor | None) -> Route:
        elements = bucket.elements(buffer, 1, bucket.dtype)
        yield from self.ranks.all_reduce(elements)
        self.learn(bucket, elements)
        self.step_pieces(bucket, elements, 0, multiplier)

    def route_kept(self, bucket: Bucket, buffer: Tensor) -> Route:
        elements = bucket.elements(buffer, 1, bucket.dtype)
        yield from self.ranks.reduce_scatter(elements)
        mine = self.ranks.part(elements)
        self.keep(bucket, mine)
        start = self.ranks.rank * len(mine)
        for piece in self.stepped(bucket):
            end = piece.offset + (piece.end - piece.first) * columns(piece.param)
            here = mine[max(piece.offset - start, 0) : max(end - start, 0)]
            self.norm_of(piece, torch.float64).copy_(torch.linalg.vector_norm(here, dtype=torch.float64).square())

    def route_from_kept(self, bucket: Bucket, mine: Tensor, buffer: Tensor, multiplier: Tensor | None) -> Route:
        elements = bucket.elements(buffer, 1, bucket.dtype)
        self.ranks.part(elements).copy_(mine)
        yield self.ranks.all_gather(elements)
        self.step_pieces(bucket, elements, 0, multiplier, with_norms=False)
