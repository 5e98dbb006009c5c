"""Adamax: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 2, as ``torch.optim.Adamax``.

Weight decay is L2. ``eps`` is added to the absolute gradient, where torch adds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..lerp import lerp
from ..rule import Rule, register


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    return (
        float(group["lr"]) / (1.0 - beta1**step),
        float(group["weight_decay"]),
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
        1.0 - beta1,
        beta2,
    )


def update(g, w, states, h):
    step_size, weight_decay, eps, sign, weight1, beta2 = h
    g = tl.fma(w, weight_decay, g * sign)
    exp_avg = lerp(states[0], g, weight1)
    decayed, size = states[1] * beta2, tl.abs(g) + eps
    # As a select it keeps its registers; tl.maximum spilled 112 bytes on sm_90.
    exp_inf = tl.where(decayed > size, decayed, size)
    w = w - step_size * exp_avg / exp_inf
    return w, (exp_avg, exp_inf)


register(
    Rule(
        name="adamax",
        states=("exp_avg", "exp_inf"),
        nonnegative=("exp_inf",),
        defaults={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
        scalars=scalars,
        update=update,
    )
)
