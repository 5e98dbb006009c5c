"""Adam-mini: Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More, arXiv:2406.16793, algorithm 1.

AdamW with one second moment a block: ``v <- beta2 v + (1 - beta2) mean of G^2 over the block``, and
``w <- w (1 - lr weight_decay) - lr m_hat / (sqrt(v_hat) + eps)``, the decay decoupled.

``block_rows`` is how many rows of a matrix make a block. The paper's partition of a transformer (algorithm 3)
is 1 for values, projections, MLPs (an output neuron), embeddings and the head (a token), and the size of a
head for queries and keys: give these a group of their own. None: the whole tensor is one block, which a
vector is in any case.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import STORE_GRADIENT, Measure, Stage, Stages, sign_of


def check(rule: Rule, group: Mapping) -> None:
    if group["block_rows"] is not None:
        rule.require_whole(group, "block_rows", 1)


def fits(group: Mapping, shape: torch.Size) -> None:
    if len(shape) > 1 and group["block_rows"] and shape[0] % group["block_rows"]:
        raise ValueError(
            f"adam_mini: block_rows={group['block_rows']} does not divide the {shape[0]} rows of {list(shape)}; give "
            "this weight a group with a block_rows of its own"
        )


def statistics_for(group: Mapping, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    whole = len(shape) < 2 or group["block_rows"] is None
    return {"exp_avg_sq": (1 if whole else shape[0] // group["block_rows"],)}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    own = (1.0 - beta2, 1.0 - beta1**step, (1.0 - beta2**step) ** 0.5, float(group["eps"]))
    return (1.0 - beta1, sign_of(group), *own, 1.0 - lr * float(group["weight_decay"]), lr)


def squares(g, w, h):
    return (g * g,)


def over_rows(dims: int) -> tuple:
    return ((0, tuple(range(1, dims)) if dims > 1 else tuple(range(dims))),)


def settle(numbers, statistics, h, layer):
    ((old,), (rows,)) = statistics, numbers
    of_blocks = rows.view(-1) if rows.numel() == old.numel() else rows.view(old.numel(), -1).mean(dim=1)
    new = torch.lerp(old, of_blocks, h[2])
    return (new,), (new.repeat_interleave(rows.numel() // max(1, new.numel())).view(rows.shape),)


def update(g, w, states, h):
    weight, sign, _, correction1, correction2_sqrt, eps, decay, lr, exp_avg_sq = h
    exp_avg = tl.fma(g * sign - states[0], weight, states[0])
    below = (tl.sqrt(exp_avg_sq) / correction2_sqrt + eps) * correction1
    return tl.fma(exp_avg / below, -lr, w * decay), (exp_avg,)


STAGES = Stages(
    STORE_GRADIENT,
    Stage("adam_mini", ("exp_avg",), 8, update),
    measures=(Measure(squares, over_rows, settle),),
)

register(
    Rule(
        name="adam_mini",
        regime="deferred",
        states=("exp_avg",),
        statistics_for=statistics_for,
        defaults={
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "block_rows": 1,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        fits=fits,
        stages_for=lambda group: STAGES,
    )
)
