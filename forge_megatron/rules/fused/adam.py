"""Adam: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 1, as ``torch.optim.Adam``.

Weight decay is L2: ``weight_decay * weight`` is added to the gradient, and so reaches both moments. The
arithmetic is that of :mod:`.adamw`, without its decay.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..rule import Rule, register
from . import adamw


def check(rule: Rule, group: Mapping) -> None:
    if group["decoupled_weight_decay"]:
        raise ValueError("adam: decoupled_weight_decay=True is refused: this rule's decay is L2; use the rule adamw")


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    return (*adamw.scalars({**group, "weight_decay": 0.0}, step), float(group["weight_decay"]))


register(
    Rule(
        name="adam",
        states=("exp_avg", "exp_avg_sq"),
        nonnegative=("exp_avg_sq", "max_exp_avg_sq"),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
            "maximize": False,
            "decoupled_weight_decay": False,
        },
        scalars=scalars,
        update=adamw.update,
        check=check,
        states_for=adamw.states_for,
    )
)
