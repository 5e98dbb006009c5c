"""NAdam: Dozat, Incorporating Nesterov Momentum into Adam, as ``torch.optim.NAdam``.

Weight decay is L2, or decoupled with ``decoupled_weight_decay``. The product of all momenta so far is kept
as ``mu_product``, so that ``betas`` and ``momentum_decay`` may follow a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..lerp import lerp
from ..rule import Rule, register


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "momentum_decay", 0.0)


def momentum(group: Mapping, step: int) -> float:
    return float(group["betas"][0]) * (1.0 - 0.5 * 0.96 ** (step * float(group["momentum_decay"])))


def advance(group: Mapping, step: int, mu_product: float) -> tuple[float]:
    return (mu_product * momentum(group, step),)


def scalars(group: Mapping, step: int, mu_product: float) -> tuple[float, ...]:
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = map(float, group["betas"])
    decoupled = group["decoupled_weight_decay"]
    mu, mu_next = momentum(group, step), momentum(group, step + 1)
    mu_product *= mu
    return (
        1.0 - lr * weight_decay if decoupled else 1.0,
        0.0 if decoupled else weight_decay,
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 - beta2**step,
        lr * (1.0 - mu) / (1.0 - mu_product),
        lr * mu_next / (1.0 - mu_product * mu_next),
    )


def update(g, w, states, h):
    decay, l2, eps, sign, weight1, beta2, weight2, bias_correction2, of_g, of_exp_avg = h
    g = tl.fma(w, l2, g * sign)
    w = w * decay
    exp_avg = lerp(states[0], g, weight1)
    exp_avg_sq = tl.fma(g * weight2, g, states[1] * beta2)
    denom = tl.sqrt(tl.fdiv(exp_avg_sq, bias_correction2)) + eps
    w = w - tl.fdiv(of_g * g, denom)
    w = w - tl.fdiv(of_exp_avg * exp_avg, denom)
    return w, (exp_avg, exp_avg_sq)


register(
    Rule(
        name="nadam",
        states=("exp_avg", "exp_avg_sq"),
        nonnegative=("exp_avg_sq",),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": False,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
        check=check,
        running={"mu_product": 1.0},
        advance=advance,
    )
)
