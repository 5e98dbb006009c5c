"""Rules that read more than their own coordinate, cut into stages that the fused kernels run.

A step has three. The **epilogue** is a fused rule on the tile of the gradient, with a scratch of the weight's
shape in the weight's place: regime 2 updates its states there and leaves the direction, regime 3 leaves the
gradient. The **matrix** stage is torch on that one scratch. **Apply** is a fused rule again, with the
direction in the gradient's place, so masters and weight stores are what they are for every rule.

A scratch begins as NaN and a coordinate whose gradient is not finite is never written, so that it reaches the
matrix stage as NaN. What a matrix stage mixes is then NaN everywhere, and apply keeps the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .bind import torch_language as tl
from .whole import Whole

if TYPE_CHECKING:
    from .projection import Projection


@dataclass(frozen=True)
class Stage:
    """A fused rule within a rule: what the kernels read of one.

    Attributes:
        name: for errors.
        states: which of the rule's weight-shaped states it updates.
        n_scalars: how many of the rule's scalars it reads.
        update: ``(g, w, states, h) -> (w, states)``, as a rule's.
        nonnegative: which of the states are never below 0, as the rule says.
    """

    name: str
    states: tuple[str, ...]
    n_scalars: int
    update: Callable
    nonnegative: tuple[str, ...] = ()
    stages: ClassVar[None] = None


@dataclass(frozen=True)
class Stages:
    """How a rule runs.

    The rule's scalars are those of the epilogue, then the matrix stage's own, then apply's.

    Attributes:
        epilogue: on G, with the scratch as its weight.
        apply: on the direction, with the weight as its weight.
        transform: ``[..., O, I] -> [..., O, I]``, fp32, of the scratch alone: equal shapes are stacked.
        reads: what ``transform`` rounds the scratch to before anything else.
        direct: ``(u, w, states, statistics, h, whole) -> direction``, fp32, where the matrix stage reads more: the
            scratch, the weight or its master as it is stored, the epilogue's states in fp32, the statistics,
            which it updates in place, all scalars as 0-dim tensors, and the weight of which ``u``, ``w`` and the
            states may be a part. It may write to ``u``.
        projection: how matrices are stepped instead, from a projection of the gradient.
    """

    epilogue: Stage
    apply: Stage
    transform: Callable[[Tensor], Tensor] | None = None
    reads: torch.dtype = torch.float32
    direct: Callable | None = None
    projection: Projection | None = None


def store_gradient(g, w, states, h):
    return g, states


def step_decayed(u, w, states, h):
    decay, step_size = h
    return tl.fma(u, -step_size, w * decay), states


#: Regime 3's epilogue: the gradient of one layer, for as long as that layer's backward lasts.
STORE_GRADIENT = Stage("gradient", (), 0, store_gradient)

#: ``w <- w * decay - step_size * u``; scalars ``(decay, step_size)``.
STEP_DECAYED = Stage("step", (), 2, step_decayed)


def sign_of(group: Mapping) -> float:
    return -1.0 if group["maximize"] else 1.0


def root_numel(x: Tensor, whole: Whole) -> float:
    """What a whole tensor's norm is divided by to be the root mean square of its entries."""
    return math.sqrt(whole.shape(x).numel())


def settle(statistics: tuple[Tensor, ...], new: tuple[Tensor, ...], witness: Tensor) -> Tensor:
    """Replaces ``statistics`` by ``new`` unless ``witness``, a number that read every entry, is not finite.

    Returns:
        1 or NaN, 0-dim: what to multiply a direction with so that it shares the statistics' fate.
    """
    finite = torch.isfinite(witness)
    for old, value in zip(statistics, new, strict=True):
        old.copy_(torch.where(finite, value, old))
    return torch.where(finite, 1.0, math.nan)
