"""APOLLO: Zhu et al., APOLLO: SGD-like Memory, AdamW-level Performance, arXiv:2412.05270, algorithm 1.

``R`` is a random projection of G to ``rank`` (a new one each ``update_proj_gap`` updates), ``N`` Adam's direction of
R, ``s = |N| / (|R| + 1e-8)`` of each channel of the larger extent (``scale_type="channel"``) or of the whole
(``"tensor"``), and ``w <- (w - lr sqrt(scale) L (s G)) (1 - lr weight_decay)``, where ``L`` keeps the norm of
``s G`` from growing by more than 1.01 a step (Fira, arXiv:2410.01623). Bias correction, ``eps``, the order of the
decay, and vectors are GaLore's (:mod:`.galore`).

The gradient never exists: R is ``dY^T (X V^T)``, and a tile of ``s G`` is one of G, scaled where it was formed. Its
norm is a second pass over the factors, by the norm-only kernel; with one factor for all it is also G's own norm.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from .. import projection as shared
from ..projection import Projection
from ..rule import Rule, register

BASES = ("random", "range_finder", "svd")


def check(rule: Rule, group: Mapping) -> None:
    shared.check(rule, group, BASES)
    if group["scale_type"] not in ("channel", "tensor"):
        raise ValueError(f"{rule.name}: scale_type={group['scale_type']!r} is refused: use 'channel' or 'tensor'")


@functools.cache
def options(rank: int, gap: int, basis: str, scale: float, scaling: str) -> Projection:
    return Projection(rank, gap, basis, scale, scaling)


def projection_for(group: Mapping) -> Projection:
    scale = float(group["scale"]) ** 0.5
    return options(group["rank"], group["update_proj_gap"], group["proj"], scale, group["scale_type"])


def apollo(name: str, **defaults) -> Rule:
    return shared.low_rank(name, projection_for, check, proj="random", **defaults)


register(apollo("apollo", rank=256, scale=1.0, scale_type="channel"))
