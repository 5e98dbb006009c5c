"""Stochastic gradient descent as ``torch.optim.SGD``, without momentum."""

from __future__ import annotations

from collections.abc import Mapping

from ..rule import Rule, register, require, require_off


def check(group: Mapping) -> None:
    require("sgd", "lr", group["lr"], 0.0)
    require("sgd", "weight_decay", group["weight_decay"], 0.0)
    for name in ("momentum", "dampening", "nesterov"):
        require_off("sgd", group, name, f"leave {name} at 0, or use torch.optim.SGD")


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    return (
        float(group["lr"]),
        float(group["weight_decay"]),
        -1.0 if group["maximize"] else 1.0,
    )


def update(g, w, states, h):
    lr, weight_decay, sign = h
    g = g * sign + w * weight_decay
    return w - g * lr, states


register(
    Rule(
        name="sgd",
        regime="fused",
        states=(),
        defaults={
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
        n_scalars=3,
        scalars=scalars,
        update=update,
        check=check,
    )
)
