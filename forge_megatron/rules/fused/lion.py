"""Lion: Chen et al., Symbolic Discovery of Optimization Algorithms, program 1 (authors' ``google/automl``).

Weight decay is decoupled: the weight shrinks by ``1 - lr * weight_decay``. The step has one size, ``lr``,
in the direction of the sign of ``beta1 * exp_avg + (1 - beta1) * g``, and none where that is exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    return (
        1.0 - lr * float(group["weight_decay"]),
        lr,
        -1.0 if group["maximize"] else 1.0,
        beta1,
        1.0 - beta1,
        1.0 - beta2,
    )


def update(g, w, states, h):
    decay, lr, sign, beta1, weight1, weight2 = h
    g = g * sign
    w = w * decay
    direction = tl.fma(g, weight1, states[0] * beta1)
    w = tl.where(direction > 0.0, w - lr, tl.where(direction < 0.0, w + lr, w))
    exp_avg = tl.fma(g - states[0], weight2, states[0])
    return w, (exp_avg,)


register(
    Rule(
        name="lion",
        states=("exp_avg",),
        defaults={"betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
        scalars=scalars,
        update=update,
    )
)
