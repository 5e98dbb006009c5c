"""GaLore: Zhao et al., Memory-Efficient LLM Training by Gradient Low-Rank Projection, arXiv:2403.03507, algorithm 2.

``R = G V^T`` with the ``rank`` leading right singular vectors of the G of a refresh (``U^T G`` with the left ones
where ``O < I``), Adam's direction ``N`` of R, ``w <- (w - lr scale N V) (1 - lr weight_decay)``. Bias
correction is in the step size, ``eps`` after the uncorrected root and the decay last, as in the authors' package.
Vectors are stepped by the same Adam without a projection; the package leaves the choice of the matrices that are
projected to param groups, and so does this: embeddings and the head belong in one with ``rule="adamw"``.

The gradient never exists: R is one product of factors, ``dY^T (X V^T)``, and ``N V`` is formed tile by tile by the
fused kernel, whose epilogue steps the weight; on a GPU from bf16 parts of both that make up fp32. The projection comes
from the factors too, by a randomised range finder: **an approximation** of the authors' SVD. ``proj="svd"`` is theirs,
and forms one layer's G at a refresh.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from .. import projection as shared
from ..projection import Projection
from ..rule import Rule, register

BASES = ("range_finder", "svd")


@functools.cache
def options(rank: int, gap: int, basis: str, scale: float) -> Projection:
    return Projection(rank, gap, basis, scale)


def projection_for(group: Mapping) -> Projection:
    return options(group["rank"], group["update_proj_gap"], group["proj"], float(group["scale"]))


def check(rule: Rule, group: Mapping) -> None:
    shared.check(rule, group, BASES)


register(shared.low_rank("galore", projection_for, check, rank=128, scale=0.25, proj="range_finder"))
