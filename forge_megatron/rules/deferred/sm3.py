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
from ..stages import STORE_GRADIENT, Measure, Stage, Stages, sign_of


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
    beta, share = float(group["beta"]), 1.0 - float(group["momentum"])
    of_least, of_square = (beta, 1.0 - beta) if beta else (1.0, 1.0)
    return (of_least, of_square, float(group["eps"]), sign_of(group), share, float(group["lr"]))


def second_moment(g, h):
    least = h[6]
    for index in tl.static_range(7, len(h)):
        least = tl.minimum(least, h[index])
    return tl.fma(g * g, h[1], least * h[0])


def values(g, w, h):
    return (second_moment(g, h),)


def update(g, w, states, h):
    eps, sign, share, lr = h[2], h[3], h[4], h[5]
    direction = g * sign / tl.sqrt(second_moment(g, h) + eps)
    if len(states) == 0:
        return tl.fma(direction, -lr, w), states
    else:
        momentum = tl.fma(direction - states[0], share, states[0])
        return tl.fma(momentum, -lr, w), (momentum,)


def over_each_dimension(dims: int) -> tuple:
    return tuple((0, tuple(dim for dim in range(dims) if dim != own)) for own in range(max(1, dims)))


def settle(numbers, statistics, h, layer, keeps_largest):
    if keeps_largest:
        numbers = tuple(map(torch.maximum, statistics, numbers))
    return numbers, ()


@functools.cache
def stages(with_momentum: bool, keeps_largest: bool) -> Stages:
    apply = Stage("sm3", ("momentum_buffer",) if with_momentum else (), 6, update)
    largest = Measure(values, over_each_dimension, functools.partial(settle, keeps_largest=keeps_largest), largest=True)
    return Stages(STORE_GRADIENT, apply, measures=(largest,), given=lambda statistics: statistics)


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
