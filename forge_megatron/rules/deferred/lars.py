"""LARS: You et al., Large Batch Training of Convolutional Networks, arXiv:1708.03888, algorithm 1.

``t = trust_coefficient |w| / (|G| + weight_decay |w|)`` (1 where it is not defined), ``d = t (G + weight_decay w)``,
``B <- momentum B + (1 - dampening) d``, ``w <- w - lr B`` (``d + momentum B`` with ``nesterov``). Weight decay is L2:
part of what is scaled. Vectors are stepped with ``t = 1`` and without decay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ..bind import torch_language as tl
from ..rule import Rule, register
from ..stages import STORE_GRADIENT, Measure, Stage, Stages, over_all, sign_of

#: How many numbers :func:`scalars` returns.
N_SCALARS = 8


def check(rule: Rule, group: Mapping) -> None:
    for name in ("momentum", "dampening"):
        rule.require(group, name, 0.0, 1.0)
    rule.require(group, "trust_coefficient", 0.0)


def states_for(group: Mapping) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    own = (float(group["trust_coefficient"]), float(group["weight_decay"]), sign_of(group))
    lr, momentum = float(group["lr"]), float(group["momentum"])
    of_d, of_buffer = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return (*own, momentum, 1.0 - float(group["dampening"]), of_d, of_buffer, lr)


def squares(g, w, h):
    return g * g, w * w


def settle(numbers, statistics, h, layer):
    if not numbers:
        nothing = torch.zeros_like(h[1])
        return (), (nothing, nothing, nothing)
    return (), (*numbers, h[1])


def update(g, w, states, h):
    coefficient, _, sign, momentum, share, of_d, of_buffer, lr, gradient_square, weight_square, weight_decay = h
    weight_norm = tl.sqrt(weight_square)
    below = tl.sqrt(gradient_square) + weight_decay * weight_norm
    ratio = tl.where((weight_norm == 0) | (below == 0), 1.0, coefficient * weight_norm / below)
    d = tl.fma(w, weight_decay, g * sign) * ratio
    if len(states) == 0:
        return tl.fma(d, -lr, w), states
    else:
        buffer = tl.fma(d, share, states[0] * momentum)
        return tl.fma(tl.fma(buffer, of_buffer, d * of_d), -lr, w), (buffer,)


def of_matrices(dims: int) -> tuple:
    return over_all(2)(dims) if dims > 1 else ()


@functools.cache
def stages(with_momentum: bool) -> Stages:
    apply = Stage("lars", ("momentum_buffer",) if with_momentum else (), N_SCALARS, update)
    return Stages(STORE_GRADIENT, apply, measures=(Measure(squares, of_matrices, settle, reads_weight=True),))


register(
    Rule(
        name="lars",
        regime="deferred",
        states=("momentum_buffer",),
        states_for=states_for,
        defaults={
            "momentum": 0.9,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "trust_coefficient": 1e-3,
            "nesterov": False,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        stages_for=lambda group: stages(bool(group["momentum"])),
        counts_steps=False,
    )
)
