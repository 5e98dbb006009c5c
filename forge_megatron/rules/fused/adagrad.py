"""Adagrad: Duchi, Hazan and Singer, Adaptive Subgradient Methods, as ``torch.optim.Adagrad``.

Weight decay is L2. ``sum`` begins at ``initial_accumulator_value``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "lr_decay", 0.0)
    rule.require(group, "initial_accumulator_value", 0.0)


def initial(group: Mapping) -> dict[str, float]:
    return {"sum": float(group["initial_accumulator_value"])}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    return (
        float(group["lr"]) / (1.0 + (step - 1) * float(group["lr_decay"])),
        float(group["weight_decay"]),
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
    )


def update(g, w, states, h):
    lr, weight_decay, eps, sign = h
    g = tl.fma(w, weight_decay, g * sign)
    total = tl.fma(g, g, states[0])
    w = w - tl.fdiv(lr * g, tl.sqrt(total) + eps)
    return w, (total,)


register(
    Rule(
        name="adagrad",
        states=("sum",),
        nonnegative=("sum",),
        defaults={
            "lr_decay": 0.0,
            "eps": 1e-10,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
        check=check,
        initial=initial,
    )
)
