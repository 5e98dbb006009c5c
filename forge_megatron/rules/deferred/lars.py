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
from ..stages import STEP_DECAYED, STORE_GRADIENT, Stage, Stages, sign_of


def check(rule: Rule, group: Mapping) -> None:
    for name in ("momentum", "dampening"):
        rule.require(group, name, 0.0, 1.0)
    rule.require(group, "trust_coefficient", 0.0)


def states_for(group: Mapping) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    own = (float(group["trust_coefficient"]), float(group["weight_decay"]), sign_of(group))
    lr, momentum = float(group["lr"]), float(group["momentum"])
    if not momentum:
        return (*own, 1.0, lr)
    of_d, of_buffer = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return (*own, momentum, 1.0 - float(group["dampening"]), of_d, of_buffer, lr)


def update(u, w, states, h):
    momentum, share, of_d, of_buffer, lr = h
    buffer = tl.fma(u, share, states[0] * momentum)
    return tl.fma(tl.fma(buffer, of_buffer, u * of_d), -lr, w), (buffer,)


def direct(u, w, states, statistics, h, whole):
    coefficient, weight_decay, sign = h[:3]
    if u.dim() < 2:
        return u.mul_(sign)
    weight_norm, gradient_norm = whole.norms(w, u)
    below = gradient_norm + weight_decay * weight_norm
    ratio = torch.where((weight_norm == 0) | (below == 0), 1.0, coefficient * weight_norm / below)
    return u.mul_(sign).addcmul_(w.float(), weight_decay).mul_(ratio)


@functools.cache
def stages(with_momentum: bool) -> Stages:
    apply = Stage("lars", ("momentum_buffer",), 5, update) if with_momentum else STEP_DECAYED
    return Stages(STORE_GRADIENT, apply, direct=direct)


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
