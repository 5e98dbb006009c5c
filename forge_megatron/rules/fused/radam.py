"""RAdam: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, as ``torch.optim.RAdam``.

Weight decay is L2, or decoupled with ``decoupled_weight_decay``. While the approximated simple moving
average is at most 5 long, the update is that of momentum: nothing is divided by the second moment.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..lerp import lerp
from ..rule import Rule, register


def rectification(beta2: float, step: int) -> float | None:
    """The factor of the adaptive step, None where the variance is not tractable yet."""
    rho_inf = 2.0 / (1.0 - beta2) - 1.0
    rho = rho_inf - 2.0 * step * beta2**step / (1.0 - beta2**step)
    if rho <= 5.0:
        return None
    return ((rho - 4.0) * (rho - 2.0) * rho_inf / ((rho_inf - 4.0) * (rho_inf - 2.0) * rho)) ** 0.5


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    decoupled = group["decoupled_weight_decay"]
    rectified = rectification(beta2, step)
    adaptive = 1.0 if rectified is None else rectified * (1.0 - beta2**step) ** 0.5
    return (
        1.0 - lr * weight_decay if decoupled else 1.0,
        0.0 if decoupled else weight_decay,
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr * adaptive / (1.0 - beta1**step),
        0.0 if rectified is None else 1.0,
    )


def update(g, w, states, h):
    decay, l2, eps, sign, weight1, beta2, weight2, step_size, adaptive = h
    g = tl.fma(w, l2, g * sign)
    w = w * decay
    exp_avg = lerp(states[0], g, weight1)
    exp_avg_sq = tl.fma(g * weight2, g, states[1] * beta2)
    denom = tl.where(adaptive > 0.0, tl.sqrt(exp_avg_sq) + eps, 1.0)
    w = w - tl.fdiv(step_size * exp_avg, denom)
    return w, (exp_avg, exp_avg_sq)


register(
    Rule(
        name="radam",
        states=("exp_avg", "exp_avg_sq"),
        nonnegative=("exp_avg_sq",),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "decoupled_weight_decay": False,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
    )
)
