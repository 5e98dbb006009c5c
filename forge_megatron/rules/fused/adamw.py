"""AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

The order of operations is ``torch.optim.AdamW``'s: decay first, ``exp_avg`` by lerp, the bias
corrections in the step size and under the root, ``eps`` after the root.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register, require_off


def check(group: Mapping) -> None:
    require_off("adamw", group, "amsgrad", "leave amsgrad=False, or use torch.optim.AdamW")


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    return (
        1.0 - lr * float(group["weight_decay"]),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        (1.0 - beta2**step) ** 0.5,
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
    )


def update(g, w, states, h):
    exp_avg, exp_avg_sq = states
    decay, weight1, beta2, weight2, step_size, bias_correction2_sqrt, eps, sign = h
    g = g * sign
    w = w * decay
    exp_avg = tl.fma(g - exp_avg, weight1, exp_avg)
    exp_avg_sq = tl.fma(g * weight2, g, exp_avg_sq * beta2)
    denom = tl.sqrt(exp_avg_sq) / bias_correction2_sqrt + eps
    w = w - step_size * exp_avg / denom
    return w, (exp_avg, exp_avg_sq)


register(
    Rule(
        name="adamw",
        states=("exp_avg", "exp_avg_sq"),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "amsgrad": False,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
        check=check,
    )
)
