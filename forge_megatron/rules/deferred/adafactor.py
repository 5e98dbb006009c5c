"""Adafactor as ``torch.optim.Adafactor``: Shazeer and Stern, arXiv:1804.04235, with its relative step size.

With ``b = step ** beta2_decay``: ``row_var <- lerp(row_var, mean of G^2 over columns, b)``, ``col_var`` the same
over rows, ``V = row_var col_var / mean(row_var)``, ``U = G / sqrt(V)``, and
``w <- w (1 - lr weight_decay) - max(eps2, rms(w)) min(lr, step ** -0.5) U / max(1, rms(U) / d)``. The decay is
decoupled; ``rms(w)`` is that from before it. A vector has ``variance`` in place of the two factors. ``eps`` is
``(eps1, eps2)``; ``eps1=None`` is the resolution of the dtype that is stepped (a master's is fp32).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..rule import Rule, register
from ..stages import STEP_DECAYED, STORE_GRADIENT, Stages, root_numel, settle, sign_of


def check(rule: Rule, group: Mapping) -> None:
    if not -math.inf < float(group["beta2_decay"]) <= 0.0:
        raise ValueError(f"adafactor: beta2_decay={group['beta2_decay']!r} is refused: give a number of at most 0")
    rule.require(group, "d", 1.0)
    if not isinstance(group["eps"], (tuple, list)) or len(group["eps"]) != 2:
        raise ValueError(f"adafactor: eps={group['eps']!r} is refused: give (eps1 or None, eps2)")
    eps1, eps2 = group["eps"]
    if not (eps1 is None or 0.0 <= float(eps1) < math.inf) or not 0.0 <= float(eps2) < math.inf:
        raise ValueError(f"adafactor: eps={group['eps']!r} is refused: give numbers of at least 0, or None for eps1")


def statistics_for(group: Mapping, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    own = (step ** float(group["beta2_decay"]), min(lr, step**-0.5), float(group["eps"][1]), float(group["d"]))
    return (*own, sign_of(group), 1.0 - lr * float(group["weight_decay"]), 1.0)


def sum_of_squares(g: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(g, dim=dim, keepdim=True).square_()


def direct(u, w, states, statistics, h, whole, eps1):
    share, relative_step, eps2, d, sign = h[:5]
    eps1 = torch.finfo(w.dtype).eps if eps1 is None else eps1
    if len(statistics) == 1:
        (squares,) = whole.sums((u.square(), ()))
        new = (torch.lerp(statistics[0], squares, share),)
        variance = whole.part(new[0]).clone()
    else:
        sums = whole.sums(*((sum_of_squares(u, dim), (dim,)) for dim in (-1, -2)))
        means = (sum.div_(whole.shape(u)[dim]) for dim, sum in zip((-1, -2), sums, strict=True))
        new = tuple(torch.lerp(old, mean, share) for old, mean in zip(statistics, means, strict=True))
        variance = whole.part(new[0]) * whole.part(new[1])
        variance.div_(new[0].mean(dim=-2, keepdim=True).clamp_(min=eps1))
    update = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(u)
    size, weight_norm = whole.norms(update, w)
    alpha = torch.maximum(eps2, weight_norm / root_numel(w, whole)) * relative_step
    alpha = alpha * sign / torch.clamp(size / (root_numel(u, whole) * d), min=1.0)
    return update.mul_(alpha * settle(statistics, new, size))


@functools.cache
def stages(eps1: float | None) -> Stages:
    return Stages(STORE_GRADIENT, STEP_DECAYED, direct=functools.partial(direct, eps1=eps1))


register(
    Rule(
        name="adafactor",
        regime="deferred",
        states=(),
        statistics_for=statistics_for,
        defaults={
            "beta2_decay": -0.8,
            "eps": (None, 1e-3),
            "d": 1.0,
            "weight_decay": 0.0,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        stages_for=lambda group: stages(group["eps"][0]),
    )
)
