"""SM3: Anil et al., Memory-Efficient Adaptive Optimization, arXiv:1901.11150, algorithm SM3-II.

One accumulator along each dimension: ``v = min of the accumulators + G^2``, ``accumulator_i <- max of v over
all dimensions but i``, ``w <- w - lr G / sqrt(v + eps)``. With ``beta`` above 0, ``v = beta min + (1 - beta) G^2`` and
an accumulator never falls; with ``momentum``, the direction is its moving average ``lerp(m, ., 1 - momentum)``. There
is no weight decay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import STEP_DECAYED, STORE_GRADIENT, Stage, Stages, settle, sign_of


def check(rule: Rule, group: Mapping) -> None:
    for name in ("momentum", "beta"):
        rule.require(group, name, 0.0, 1.0)


def states_for(group: Mapping) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def statistics_for(group: Mapping, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    if not shape:
        return {"accumulator_0": ()}
    return {
        f"accumulator_{i}": tuple(extent if i == j else 1 for j, extent in enumerate(shape)) for i in range(len(shape))
    }


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    own = (float(group["beta"]), float(group["eps"]), sign_of(group))
    lr = float(group["lr"])
    return (*own, 1.0 - float(group["momentum"]), lr) if group["momentum"] else (*own, 1.0, lr)


def update(u, w, states, h):
    share, lr = h
    momentum = tl.fma(u - states[0], share, states[0])
    return tl.fma(momentum, -lr, w), (momentum,)


def direct(u, w, states, statistics, h, whole, keeps_largest):
    beta, eps, sign = h[:3]
    parts = [whole.part(accumulator) for accumulator in statistics]
    least = functools.reduce(torch.minimum, parts[1:], parts[0].clone())
    v = least.mul_(beta).addcmul_(u.square(), 1.0 - beta) if keeps_largest else least.addcmul_(u, u)
    all_others = [tuple(dim for dim in range(v.dim()) if dim != index) for index in range(len(statistics))]
    largest = torch.amax if v.numel() else torch.sum  # a rank may have no rows
    new = whole.maxima(*((largest(v, others, keepdim=True) if others else v, others) for others in all_others))
    if keeps_largest:
        new = [torch.maximum(accumulator, now) for accumulator, now in zip(statistics, new, strict=True)]
    poison = settle(statistics, tuple(new), new[0].sum())
    return v.add_(eps).rsqrt_().mul_(u).mul_(sign * poison)


@functools.cache
def stages(with_momentum: bool, keeps_largest: bool) -> Stages:
    apply = Stage("sm3", ("momentum_buffer",), 2, update) if with_momentum else STEP_DECAYED
    return Stages(STORE_GRADIENT, apply, direct=functools.partial(direct, keeps_largest=keeps_largest))


register(
    Rule(
        name="sm3",
        regime="deferred",
        states=(),
        states_for=states_for,
        statistics_for=statistics_for,
        defaults={"momentum": 0.0, "beta": 0.0, "eps": 1e-30, "maximize": False},
        scalars=scalars,
        check=check,
        stages_for=lambda group: stages(bool(group["momentum"]), bool(group["beta"])),
        counts_steps=False,
    )
)
