"""Stochastic gradient descent as ``torch.optim.SGD``: heavy ball, dampening, Nesterov.

Weight decay is L2. The first update takes the gradient into ``momentum_buffer`` without dampening, as
torch's does.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..rule import Rule, register


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "momentum", 0.0)
    rule.require(group, "dampening")
    if group["nesterov"] and not (group["momentum"] > 0 and group["dampening"] == 0):
        raise ValueError(
            f"{rule.name}: nesterov=True with momentum={group['momentum']!r} and dampening={group['dampening']!r} "
            "is refused: give a momentum above 0 and dampening=0"
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
    lr, weight_decay, sign = h[:3]
    g = tl.fma(w, weight_decay, g * sign)
    if len(states) == 1:
        kept, added, of_g, of_buffer = h[3:]
        buffer = tl.fma(g, added, states[0] * kept)
        states = (buffer,)
        g = tl.fma(buffer, of_buffer, g * of_g)
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
