"""Waiting: a gradient that is complete only at ``step()`` (clipping, accumulation, several uses)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from forge_megatron import kernels
from forge_megatron.kernels import Segment
from forge_megatron.linear import OwnedWeight


class SumFactors:
    """Sums up what would take more as factors, in the backward that brings it, or when that has ended.

    Attributes:
        dtype: of the sum of a 16-bit weight's micro-batches; another's is fp32.
    """

    def __init__(self, backend: str = "auto", dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self._write = partial(kernels.wgrad, backend=backend)

    def __call__(self, owned: OwnedWeight, segments: Sequence[Segment] = (), task: int | None = None) -> None:
        owned.factors.expect_unchanged(owned.name)
        owned.factors.fold(self._write, segments, task)
