"""AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.

Weight decay is decoupled: the weight shrinks by ``1 - lr * weight_decay`` and the gradient is left alone.
``amsgrad`` divides by the largest second moment so far (Reddi et al., On the Convergence of Adam and
Beyond), at the cost of one state. The order of operations is ``torch.optim.AdamW``'s: decay first,
``exp_avg`` by lerp, the bias corrections in the step size and under the root, ``eps`` after the root.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..bind import torch_language as tl
from ..lerp import lerp
from ..rule import Rule, register


def check(rule: Rule, group: Mapping) -> None:
    if not group["decoupled_weight_decay"]:
        raise ValueError(
            "adamw: decoupled_weight_decay=False is refused: this rule's decay is decoupled; use the rule adam"
        )


def states_for(group: Mapping) -> tuple[str, ...]:
    moments = ("exp_avg", "exp_avg_sq")
    return (*moments, "max_exp_avg_sq") if group["amsgrad"] else moments


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
    """A ninth scalar is the L2 penalty of :mod:`.adam`; a third state is that of amsgrad."""
    decay, weight1, beta2, weight2, step_size, bias_correction2_sqrt, eps, sign = h[:8]
    g = g * sign
    if len(h) == 9:
        g = tl.fma(w, h[8], g)
    w = w * decay
    exp_avg = lerp(states[0], g, weight1)
    exp_avg_sq = tl.fma(g * weight2, g, states[1] * beta2)
    if len(states) == 3:
        largest = tl.maximum(states[2], exp_avg_sq)
        states = (exp_avg, exp_avg_sq, largest)
    else:
        largest = exp_avg_sq
        states = (exp_avg, exp_avg_sq)
    denom = tl.fdiv(tl.sqrt(largest), bias_correction2_sqrt) + eps
    w = w - tl.fdiv(step_size * exp_avg, denom)
    return w, states


register(
    Rule(
        name="adamw",
        states=("exp_avg", "exp_avg_sq"),
        nonnegative=("exp_avg_sq", "max_exp_avg_sq"),
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "amsgrad": False,
            "maximize": False,
            "decoupled_weight_decay": True,
        },
        scalars=scalars,
        update=update,
        check=check,
        states_for=states_for,
    )
)
