"""Adafactor as ``torch.optim.Adafactor``: Shazeer and Stern, arXiv:1804.04235, with its relative step size.

With ``b = step ** beta2_decay``: ``row_var <- lerp(row_var, mean of G^2 over columns, b)``, ``col_var`` the same
over rows, ``V = row_var col_var / mean(row_var)``, ``U = G / sqrt(V)``, and
``w <- w (1 - lr weight_decay) - max(eps2, rms(w)) min(lr, step ** -0.5) U / max(1, rms(U) / d)``. The decay is
decoupled; ``rms(w)`` is that from before it. A vector has ``variance`` in place of the two factors. ``eps`` is
``(eps1, eps2)``; ``eps1=None`` is the resolution of the dtype that is stepped (a master's is fp32).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import STORE_GRADIENT, Measure, Stage, Stages, over_all, over_rows_and_columns, sign_of


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "beta2_decay")
    if group["beta2_decay"] > 0.0:
        raise ValueError(f"adafactor: beta2_decay={group['beta2_decay']!r} is refused: give a number of at most 0")
    rule.require(group, "d", 1.0)
    if not isinstance(group["eps"], (tuple, list)) or len(group["eps"]) != 2:
        raise ValueError(f"adafactor: eps={group['eps']!r} is refused: give (eps1 or None, eps2)")
    named = {f"eps[{index}]": value for index, value in enumerate(group["eps"])}
    for name in ("eps[1]",) if named["eps[0]"] is None else named:
        rule.require(named, name, 0.0)


def statistics_for(group: Mapping, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    own = (step ** float(group["beta2_decay"]), min(lr, step**-0.5), float(group["eps"][1]), float(group["d"]))
    return (*own, sign_of(group), 1.0 - lr * float(group["weight_decay"]))


def squares(g, w, h):
    return (g * g,)


def settle(numbers, statistics, h, layer, eps1):
    eps1 = torch.finfo(layer.dtype).eps if eps1 is None else eps1
    new = tuple(torch.lerp(old, mean, h[0]) for old, mean in zip(statistics, numbers, strict=True))
    least = torch.full_like(h[0], eps1 * eps1)
    if len(new) == 1:
        return new, (new[0], torch.ones_like(h[0]), least)
    row, column = new
    return new, (row / row.mean(dim=-2, keepdim=True).clamp_(min=eps1), column, least)


def direction(g, h):
    return g / tl.sqrt(tl.maximum(h[6] * h[7], h[8]))


def sizes(g, w, h):
    u = direction(g, h)
    return u * u, w * w


def update(g, w, states, h):
    relative_step, eps2, d, sign, decay = h[1], h[2], h[3], h[4], h[5]
    size = tl.sqrt(h[9]) / d
    step_size = tl.maximum(eps2, tl.sqrt(h[10])) * relative_step * sign / tl.where(size > 1.0, size, 1.0)
    return tl.fma(direction(g, h), -step_size, w * decay), states


@functools.cache
def stages(eps1: float | None) -> Stages:
    factored = Measure(squares, over_rows_and_columns, functools.partial(settle, eps1=eps1))
    apply = Stage("adafactor", (), 6, update)
    return Stages(STORE_GRADIENT, apply, measures=(factored, Measure(sizes, over_all(2), reads_weight=True)))


register(
    Rule(
        name="adafactor",
        regime="deferred",
        states=(),
        statistics_for=statistics_for,
        defaults={
            "beta2_decay": -0.8,
            "eps": (None, 1e-3),
            "d": 1.0,
            "weight_decay": 0.0,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        stages_for=lambda group: stages(group["eps"][0]),
    )
)
