"""AdaLomo: Lv et al., AdaLomo: Low-memory Optimization with Adaptive Learning Rate, arXiv:2310.10195, algorithm 1.

Adafactor's factored second moment and update clipping, with the step size relative to the weight:
with ``b = step ** decay_rate``, ``row <- lerp(row, mean of G^2 + eps1 over columns, b)``, ``col`` the same over
rows, ``U = G sqrt(mean(row)) / sqrt(row col)``, ``s = lr max(eps2, rms(w))``, and
``w <- w (1 - s weight_decay) - s U / max(1, rms(U) / clip_threshold)``. The decay is decoupled and, as the
authors' is, relative to the weight's size too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import STORE_GRADIENT, Measure, Stage, Stages, over_all, over_rows_and_columns, sign_of


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "decay_rate")
    if group["decay_rate"] > 0.0:
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
    )


def squares(g, w, h):
    return (g * g + h[1],)


def settle(numbers, statistics, h, layer):
    new = tuple(torch.lerp(old, mean.view(old.shape), h[0]) for old, mean in zip(statistics, numbers, strict=True))
    if len(new) == 1:
        return new, (new[0], torch.ones_like(h[0]))
    row, column = new
    return new, ((row / row.mean(dim=-1, keepdim=True)).unsqueeze(-1), column.unsqueeze(-2))


def direction(g, h):
    return g / (tl.sqrt(h[7]) * tl.sqrt(h[8]))


def sizes(g, w, h):
    u = direction(g, h)
    return u * u, w * w


def update(g, w, states, h):
    eps2, threshold, lr, weight_decay, sign = h[2], h[3], h[4], h[5], h[6]
    size = tl.sqrt(h[9]) / threshold
    step_size = lr * tl.maximum(eps2, tl.sqrt(h[10]))
    clipped = step_size * sign / tl.where(size > 1.0, size, 1.0)
    return tl.fma(direction(g, h), -clipped, w * (1.0 - step_size * weight_decay)), states


STAGES = Stages(
    STORE_GRADIENT,
    Stage("adalomo", (), 7, update),
    measures=(Measure(squares, over_rows_and_columns, settle), Measure(sizes, over_all(2), reads_weight=True)),
)

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
