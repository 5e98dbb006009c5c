"""RMSprop: Tieleman and Hinton, as ``torch.optim.RMSprop``; centered is that of Graves (arXiv:1308.0850).

Weight decay is L2. The states are ``square_avg``, ``grad_avg`` if ``centered`` and ``momentum_buffer`` with
a ``momentum``. The variance of the centered form is a difference: where rounding makes it negative (states
in bf16 do sooner) the root is NaN, as torch's is, and so is the weight: keep them in fp32. 8-bit states of it are
refused. Where a gradient varies by a tenth of its mean, its variance is a hundredth of ``square_avg``, of which a code
has two digits:
between int8 codes the difference is below 0 for half of the coordinates, and e4m3 rounds a mean and the root of a mean
square to the same code, so that ``eps`` alone is left of the root. No floor would mend that. What 8 bits could hold is
the variance itself, ``v <- alpha v + alpha (1 - alpha) (g - grad_avg)^2``, the same number in exact arithmetic and
never below 0; but ``square_avg`` would then not be what ``torch.optim`` has by that name.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..lerp import lerp
from ..rule import Rule, register


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "alpha", 0.0)
    if group["alpha"] > 1.0:
        raise ValueError(
            f"rmsprop: alpha={group['alpha']!r} is refused: a mean square would fall below 0; give at most 1"
        )
    rule.require(group, "momentum", 0.0)


def states_for(group: Mapping) -> tuple[str, ...]:
    centered = ("grad_avg",) if group["centered"] else ()
    momentum = ("momentum_buffer",) if group["momentum"] else ()
    return ("square_avg", *centered, *momentum)


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    alpha, momentum = float(group["alpha"]), float(group["momentum"])
    plain = (
        float(group["lr"]),
        float(group["weight_decay"]),
        float(group["eps"]),
        -1.0 if group["maximize"] else 1.0,
        alpha,
        1.0 - alpha,
    )
    return (*plain, momentum) if momentum else plain


def update(g, w, states, h):
    """A seventh scalar is the momentum, whose buffer is the last state."""
    lr, weight_decay, eps, sign, alpha, rest = h[:6]
    g = tl.fma(w, weight_decay, g * sign)
    square_avg = tl.fma(g * rest, g, states[0] * alpha)
    variance = square_avg
    new = (square_avg,)
    if len(states) + 5 > len(h):
        grad_avg = lerp(states[1], g, rest)
        variance = square_avg - grad_avg * grad_avg
        new = (square_avg, grad_avg)
    denom = tl.sqrt(variance) + eps
    if len(h) == 7:
        buffer = tl.fma(states[len(states) - 1], h[6], tl.fdiv(g, denom))
        w = w - buffer * lr
        new = new + (buffer,)  # noqa: RUF005 - Triton has no unpacking
    else:
        w = w - tl.fdiv(lr * g, denom)
    return w, new


register(
    Rule(
        name="rmsprop",
        states=("square_avg",),
        nonnegative=("square_avg",),
        subtracted=("grad_avg",),
        defaults={
            "momentum": 0.0,
            "alpha": 0.99,
            "eps": 1e-8,
            "centered": False,
            "weight_decay": 0.0,
            "maximize": False,
        },
        scalars=scalars,
        update=update,
        check=check,
        states_for=states_for,
    )
)
