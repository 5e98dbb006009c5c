"""Stochastic gradient descent as ``torch.optim.SGD``: heavy ball, dampening, Nesterov, L2 weight decay.

The first update takes the gradient into ``momentum_buffer`` without dampening, as torch's does.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register, require


def check(group: Mapping) -> None:
    require("sgd", "momentum", group["momentum"], 0.0)
    require("sgd", "dampening", group["dampening"], -float("inf"))
    if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
        raise ValueError(
            f"sgd: nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r} is refused: "
            "give a momentum above 0 and dampening=0"
        )


def states_for(group: Mapping) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    plain = (
        float(group["lr"]),
        float(group["weight_decay"]),
        -1.0 if group["maximize"] else 1.0,
    )
    momentum = float(group["momentum"])
    if not momentum:
        return plain
    kept, added = (0.0, 1.0) if step == 1 else (momentum, 1.0 - float(group["dampening"]))
    of_g, of_buffer = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return (*plain, kept, added, of_g, of_buffer)


def update(g, w, states, h):
    lr, weight_decay, sign = h[0], h[1], h[2]
    g = tl.fma(w, weight_decay, g * sign)
    if len(states) == 1:
        buffer = tl.fma(g, h[4], states[0] * h[3])
        states = (buffer,)
        g = tl.fma(buffer, h[6], g * h[5])
    return w - g * lr, states


SGD = register(
    Rule(
        name="sgd",
        states=(),
        defaults={
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
        check=check,
        states_for=states_for,
        counts_steps=False,
    )
)
