"""Muon as ``torch.optim.Muon``: Jordan et al. (2024), with the scale conventions of both publications.

``B <- lerp(B, G, 1 - momentum)``, ``O = NewtonSchulz(lerp(G, B, momentum))`` (of B without ``nesterov``),
``w <- w (1 - lr weight_decay) - lr c O``: decoupled decay, not scaled by ``c``. ``adjust_lr_fn`` gives ``c``
of an ``[O, I]`` matrix: ``"original"``, also None, is ``sqrt(max(1, O / I))`` (Jordan),
``"match_rms_adamw"`` is ``0.2 sqrt(max(O, I))`` (Liu et al., arXiv:2502.16982).

The epilogue writes the new momentum, and Newton-Schulz's input into the scratch: exact with Nesterov too,
although the gradient is never stored (FORGE, appendix A, regime 2).

``row_split`` says which rows of a fused weight make a matrix of their own. A number ``h``: each ``h`` rows
are one (heads). Several, whose sum divides ``O``: the pattern repeats along the rows, and the parts in the
same place of every repeat make one matrix, so that Megatron's ``linear_qkv`` is
``(heads_per_group * head_dim, head_dim, head_dim)`` and ``[q, k, v]`` in a row are their three sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..lerp import lerp
from ..newton_schulz import COEFFICIENTS, NS_DTYPE, newton_schulz
from ..rule import Rule, register
from ..stages import STEP_DECAYED, Stage, Stages

SCALES = (None, "original", "match_rms_adamw")


def check(rule: Rule, group: Mapping) -> None:
    rule.require(group, "momentum", 0.0)
    if group["adjust_lr_fn"] not in SCALES:
        raise ValueError(f"muon: adjust_lr_fn={group['adjust_lr_fn']!r} is refused: use 'original' or {SCALES[2]!r}")
    rule.require_whole(group, "ns_steps", 0, 99)
    coefficients, split = group["ns_coefficients"], group["row_split"]
    if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
        raise ValueError(f"muon: ns_coefficients={coefficients!r} is refused: give three numbers")
    for index, coefficient in enumerate(coefficients):
        rule.require({f"ns_coefficients[{index}]": coefficient}, f"ns_coefficients[{index}]")
    rows = split if isinstance(split, (tuple, list)) else (split,)
    if split is not None and not (rows and all(type(r) is int and r > 0 for r in rows)):
        raise ValueError(f"muon: row_split={split!r} is refused: give a number of rows, or several")


def fits(group: Mapping, shape: torch.Size) -> None:
    if len(shape) != 2:
        raise ValueError(
            f"muon steps matrices, and this is {list(shape)}; attach(..., adamw=dict(lr=...)) steps embeddings, the "
            'head and everything that is no matrix by AdamW, or give it a group with rule="adamw"'
        )
    split = group["row_split"]
    if split is not None and shape[0] % (split if isinstance(split, int) else sum(split)):
        raise ValueError(
            f"muon: row_split={split!r} does not divide the {shape[0]} rows of {list(shape)}; give the sizes of all "
            "its blocks (gated attention has four), and weights of other layouts a group of their own"
        )


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr, momentum = float(group["lr"]), float(group["momentum"])
    return (1.0 - momentum, momentum, 1.0 - lr * float(group["weight_decay"]), lr)


def heavy_ball(g, w, states, h):
    weight, _ = h
    momentum = lerp(states[0], g, weight)
    return momentum, (momentum,)


def nesterov(g, w, states, h):
    weight, ahead = h
    momentum = lerp(states[0], g, weight)
    return lerp(g, momentum, ahead), (momentum,)


def scale(rows: int, columns: int, convention: str | None) -> float:
    if convention == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonal(u: Tensor, split, steps: int, coefficients: tuple, eps: float, convention: str | None) -> Tensor:
    """Replace ``u [..., O, I]`` by its scaled polar factor, or by those of the matrices that ``split`` names."""
    batch, columns = u.shape[:-2], u.shape[-1]
    if split is None:
        parts = (u,)
    elif isinstance(split, int):
        parts = (u.unflatten(-2, (-1, split)),)
    else:
        parts = u.unflatten(-2, (-1, sum(split))).split(split, dim=-2)
    for part in parts:
        matrix = part if split is None or isinstance(split, int) else part.reshape(*batch, -1, columns)
        factor = newton_schulz(matrix, steps, coefficients, eps)
        part.copy_(factor.reshape(part.shape))
        if (of_shape := scale(matrix.shape[-2], columns, convention)) != 1.0:
            part.mul_(of_shape)
    return u


@functools.cache
def stages(is_nesterov: bool, *options) -> Stages:
    epilogue = Stage("muon", ("momentum_buffer",), 2, nesterov if is_nesterov else heavy_ball, on_scratch=True)
    split, steps, coefficients, eps, convention = options
    transform = functools.partial(
        orthogonal, split=split, steps=steps, coefficients=coefficients, eps=eps, convention=convention
    )
    return Stages(epilogue, STEP_DECAYED, transform=transform, reads=NS_DTYPE)


def stages_of(group: Mapping) -> Stages:
    split = group["row_split"]
    return stages(
        bool(group["nesterov"]),
        split if split is None or isinstance(split, int) else tuple(split),
        group["ns_steps"],
        tuple(map(float, group["ns_coefficients"])),
        float(group["eps"]),
        group["adjust_lr_fn"],
    )


register(
    Rule(
        name="muon",
        regime="split",
        states=("momentum_buffer",),
        defaults={
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": COEFFICIENTS,
            "eps": 1e-7,
            "ns_steps": 5,
            "adjust_lr_fn": None,
            "row_split": None,
        },
        scalars=scalars,
        check=check,
        fits=fits,
        stages_for=stages_of,
        counts_steps=False,
    )
)
