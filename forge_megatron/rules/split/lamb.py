"""LAMB: You et al., Large Batch Optimization for Deep Learning, arXiv:1904.00962, algorithm 2.

``r = m_hat / (sqrt(v_hat) + eps)``, ``u = r + weight_decay w``, ``w <- w - lr (|w| / |u|) u``, with the norms
of the whole tensor and the ratio 1 where one of them is 0. Weight decay is inside ``u``: it is neither added
to the gradient nor independent of the ratio. ``bias_correction=False`` leaves ``m`` and ``v`` as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import Measure, Stage, Stages, over_all, sign_of


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    beta1, beta2 = map(float, group["betas"])
    correction1, correction2 = (1.0 - beta1**step, 1.0 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    epilogue = (1.0 - beta1, beta2, 1.0 - beta2, correction1, correction2**0.5, float(group["eps"]), sign_of(group))
    return (*epilogue, float(group["weight_decay"]), float(group["lr"]))


def update(g, w, states, h):
    exp_avg, exp_avg_sq = states
    weight1, beta2, weight2, correction1, correction2_sqrt, eps, sign = h
    g = g * sign
    exp_avg = tl.fma(g - exp_avg, weight1, exp_avg)
    exp_avg_sq = tl.fma(g * weight2, g, exp_avg_sq * beta2)
    return exp_avg / correction1 / (tl.sqrt(exp_avg_sq) / correction2_sqrt + eps), (exp_avg, exp_avg_sq)


def sizes(r, w, h):
    u = tl.fma(w, h[0], r)
    return u * u, w * w


def apply(r, w, states, h):
    weight_decay, lr, size, weight_size = h
    ratio = tl.where((size == 0) | (weight_size == 0), 1.0, tl.sqrt(weight_size) / tl.sqrt(size))
    return tl.fma(tl.fma(w, weight_decay, r), -lr * ratio, w), states


STAGES = Stages(
    Stage("lamb", ("exp_avg", "exp_avg_sq"), 7, update, ("exp_avg_sq",), on_scratch=True),
    Stage("lamb", (), 2, apply),
    measures=(Measure(sizes, over_all(2), reads_weight=True),),
)

register(
    Rule(
        name="lamb",
        regime="split",
        states=("exp_avg", "exp_avg_sq"),
        nonnegative=("exp_avg_sq",),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.01,
            "bias_correction": True,
            "maximize": False,
        },
        scalars=scalars,
        stages_for=lambda group: STAGES,
    )
)
