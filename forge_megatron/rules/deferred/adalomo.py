"""AdaLomo: Lv et al., AdaLomo: Low-memory Optimization with Adaptive Learning Rate, arXiv:2310.10195, algorithm 1.

Adafactor's factored second moment and update clipping, with the step size relative to the weight:
with ``b = step ** decay_rate``, ``row <- lerp(row, mean of G^2 + eps1 over columns, b)``, ``col`` the same over
rows, ``U = G sqrt(mean(row)) / sqrt(row col)``, ``s = lr max(eps2, rms(w))``, and
``w <- w (1 - s weight_decay) - s U / max(1, rms(U) / clip_threshold)``. The decay is decoupled and, as the
authors' is, relative to the weight's size too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..rule import Rule, register
from ..stages import STEP_DECAYED, STORE_GRADIENT, Stages, root_numel, settle, sign_of


def check(rule: Rule, group: Mapping) -> None:
    if not -math.inf < float(group["decay_rate"]) <= 0.0:
        raise ValueError(f"adalomo: decay_rate={group['decay_rate']!r} is refused: give a number of at most 0")
    for name in ("eps1", "eps2", "clip_threshold"):
        rule.require(group, name, 0.0)


def statistics_for(group: Mapping, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    if len(shape) < 2:
        return {"exp_avg_sq": tuple(shape)}
    return {"exp_avg_sq_row": tuple(shape[:-1]), "exp_avg_sq_col": (*shape[:-2], shape[-1])}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    return (
        step ** float(group["decay_rate"]),
        float(group["eps1"]),
        float(group["eps2"]),
        float(group["clip_threshold"]),
        float(group["lr"]),
        float(group["weight_decay"]),
        sign_of(group),
        1.0,
        1.0,
    )


def direct(u, w, states, statistics, h, whole):
    share, eps1, eps2, threshold, lr, weight_decay, sign = h[:7]
    squares = u.square().add_(eps1)
    if len(statistics) == 1:
        (squares,) = whole.sums((squares, ()))
        new = (torch.lerp(statistics[0], squares, share),)
        update = whole.part(new[0]).rsqrt().mul_(u)
    else:
        sums = whole.sums(*((squares.sum(dim, keepdim=True), (dim,)) for dim in (-1, -2)))
        means = (sum.div_(whole.shape(u)[dim]).squeeze(dim) for dim, sum in zip((-1, -2), sums, strict=True))
        new = tuple(torch.lerp(old, mean, share) for old, mean in zip(statistics, means, strict=True))
        row = (new[0] / new[0].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = torch.mul(whole.part(row), whole.part(new[1].unsqueeze(-2)).rsqrt(), out=squares).mul_(u)
    size, weight_size = (norm / root_numel(u, whole) for norm in whole.norms(update, w))
    step_size = lr * torch.maximum(eps2, weight_size) * settle(statistics, new, size)
    update.mul_(step_size * sign / torch.clamp(size / threshold, min=1.0))
    return update.addcmul_(w.float(), step_size * weight_decay)


STAGES = Stages(STORE_GRADIENT, STEP_DECAYED, direct=direct)

register(
    Rule(
        name="adalomo",
        regime="deferred",
        states=(),
        statistics_for=statistics_for,
        defaults={
            "decay_rate": -0.8,
            "eps1": 1e-30,
            "eps2": 1e-3,
            "clip_threshold": 1.0,
            "weight_decay": 0.0,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        stages_for=lambda group: STAGES,
    )
)
