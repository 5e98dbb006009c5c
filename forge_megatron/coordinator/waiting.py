"""Waiting: a gradient that is complete only at ``step()`` (clipping, accumulation, several uses)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from forge_megatron import kernels
from forge_megatron.linear import OwnedWeight


class KeepFactors:
    """Leaves the factors in the weight's store; sums them up once they would outgrow the gradient."""

    def __init__(self, backend: str = "auto"):
        self._accumulate = partial(kernels.wgrad_accumulate, backend=backend)

    def __call__(self, owned: OwnedWeight, segments: list[tuple[Tensor, Tensor]]) -> None:
        if owned.factors.outgrown():
            owned.factors.expect_unchanged(owned.name)
            owned.factors.fold(self._accumulate)
