"""Scion: Pethick et al., Training Deep Learning Models with Norm-Constrained LMOs, arXiv:2502.07529.

``d <- (1 - momentum) d + momentum G``: ``momentum`` is the share of the *new* gradient, the paper's alpha.
Then ``w <- w - lr scale o``, ``o`` the direction of steepest descent in a norm (algorithm 1, unconstrained),
or with ``constraint=True`` ``w <- (1 - lr) w - lr scale o`` (algorithm 2), which keeps the weight within
``scale`` of 0 in that norm. ``weight_decay`` is decoupled: ``w <- (1 - lr weight_decay) w`` first, for the
unconstrained form alone.

``norm_type``, of an ``[O, I]`` matrix (table 2):

* ``"spectral"``: ``sqrt(O / I) NewtonSchulz(d)``; a convolution's kernel is flattened to ``[O, I k]`` and
  scaled by ``sqrt(O / I) / k``
* ``"sign"``: ``sign(d) / I``, for the head and for embeddings that it is tied to
* ``"rms"``: ``d / rms(d)``, for vectors
* ``"auto"``: spectral, and rms for vectors
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..bind import torch_language as tl
from ..newton_schulz import COEFFICIENTS, NS_DTYPE, newton_schulz
from ..rule import Rule, register
from ..stages import STEP_DECAYED, Stage, Stages, root_numel, sign_of
from ..whole import Whole

NORMS = ("auto", "spectral", "sign", "rms")


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "momentum")
    if not 0.0 < group["momentum"] <= 1.0:
        raise ValueError(
            f"scion: momentum={group['momentum']!r} is refused: it is the share of the new gradient, above 0 and at "
            "most 1 (0.1 is what others call momentum 0.9)"
        )
    rule.require(group, "scale", 0.0)
    if group["scale"] == 0.0:
        raise ValueError(f"scion: scale={group['scale']!r} is refused: give a number above 0")
    if group["norm_type"] not in NORMS:
        raise ValueError(f"scion: norm_type={group['norm_type']!r} is refused: use one of {', '.join(NORMS)}")
    rule.require_whole(group, "ns_steps", 0, 99)
    if group["constraint"]:
        rule.require(group, "lr", 0.0, 1.0)
        if group["weight_decay"]:
            raise ValueError(
                f"scion: weight_decay={group['weight_decay']!r} with constraint=True is refused: the constraint decays "
                "by lr; leave weight_decay at 0"
            )


def fits(group: Mapping, shape: torch.Size) -> None:
    if group["norm_type"] in ("spectral", "sign") and len(shape) < 2:
        raise ValueError(
            f'scion: norm_type={group["norm_type"]!r} is of matrices, and this is {list(shape)}; use "auto" or "rms"'
        )


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    decay = 1.0 - lr if group["constraint"] else 1.0 - lr * float(group["weight_decay"])
    return (float(group["momentum"]), sign_of(group), decay, lr * float(group["scale"]))


def update(g, w, states, h):
    share, sign = h
    d = tl.fma(g * sign - states[0], share, states[0])
    return d, (d,)


def steepest(u: Tensor, norm_type: str, steps: int, whole: Whole) -> Tensor:
    """The linear minimisation oracle's direction for ``u``, with the sign of ``u``."""
    vector = u.dim() < 2
    if norm_type == "rms" or (norm_type == "auto" and vector):
        (size,) = whole.norms(u)
        return u.div_(size / root_numel(u, whole) + 1e-8)
    if norm_type == "sign":
        return u.sign_().div_(whole.shape(u)[1])
    return whole.transform(u, spectral_in(steps), NS_DTYPE)


@functools.cache
def spectral_in(steps: int) -> Callable[[Tensor], Tensor]:
    """:func:`spectral` in so many steps: one function, by which its graph is found again."""
    return functools.partial(spectral, steps=steps)


def spectral(u: Tensor, steps: int) -> Tensor:
    """:func:`steepest` in the spectral norm, of the whole of ``u``."""
    rows, columns = u.shape[:2]
    factor = newton_schulz(u.flatten(1), steps, COEFFICIENTS, 1e-7)
    return u.copy_(factor.reshape(u.shape)).mul_(math.sqrt(rows / columns) / math.prod(u.shape[2:]))


@functools.cache
def stages(norm_type: str, steps: int) -> Stages:
    def direct(u, statistics, h, whole):
        return steepest(u, norm_type, steps, whole)

    return Stages(Stage("scion", ("d",), 2, update, on_scratch=True), STEP_DECAYED, direct=direct)


register(
    Rule(
        name="scion",
        regime="split",
        states=("d",),
        defaults={
            "momentum": 0.1,
            "constraint": False,
            "norm_type": "auto",
            "scale": 1.0,
            "weight_decay": 0.0,
            "ns_steps": 5,
            "maximize": False,
        },
        scalars=scalars,
        check=check,
        fits=fits,
        stages_for=lambda group: stages(group["norm_type"], group["ns_steps"]),
        counts_steps=False,
    )
)
