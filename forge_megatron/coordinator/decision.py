"""What a window's gradients are multiplied by, and whether its step is taken: decided on the device.

The host does not wait for the norm. A step that is skipped whole is one whose multiplier is NaN: the kernels leave
every coordinate with a gradient that is not finite as it is, weight, master and states, bit for bit, so that a skipped
step launches the same kernels and no branch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """
    Attributes:
        multiplier: of every gradient, 0-dim fp32, or of each parameter's, ``[parameters]``; NaN skips the step;
            None: 1.
        norm: global gradient norm with the late scale and without the loss scale, before clipping, 0-dim fp32;
            None: nothing depends on it, and the step itself measures the norms.
        scale: what a gradient's own norm is multiplied by to be in the units of ``norm``; None: 1.
        skipped: 0-dim bool, true where no weight may change; None where coordinates are left out one by one.
    """

    multiplier: Tensor | None
    norm: Tensor | None = None
    scale: Tensor | None = None
    skipped: Tensor | None = None


def expect_scale(multiplier: float | Tensor | None) -> None:
    """Raises for a ``gradient_multiplier`` without a meaning; the value of a tensor is not read.

    Raises:
        ValueError: it is no finite number, and no tensor of one number.
    """
    if multiplier is None:
        return
    if isinstance(multiplier, Tensor):
        fits = multiplier.dim() == 0 and not (multiplier.is_complex() or multiplier.dtype is torch.bool)
        given = f"a {multiplier.dtype} tensor of shape {list(multiplier.shape)}"
    else:
        fits = isinstance(multiplier, Real) and not isinstance(multiplier, bool) and math.isfinite(multiplier)
        given = repr(multiplier)
    if not fits:
        raise ValueError(f"gradient_multiplier={given}; give a finite number, or a tensor of 0 dimensions")


def global_norm(norms_sq: Tensor, reduce: Callable[[Tensor], Tensor], scale: Tensor | None) -> Tensor:
    """The norm of all gradients, 0-dim fp32.

    Args:
        norms_sq: Σ g² of each parameter, ``[parameters]``.
        reduce: their sum over whatever holds a part of them.
        scale: of every gradient, 0-dim; None: 1.
    """
    norm = reduce(norms_sq).sqrt().float()
    return norm if scale is None else norm * scale.abs()


def decide(
    norms_sq: Tensor,
    reduce: Callable[[Tensor], Tensor],
    *,
    late_scale: Tensor | None,
    inverse_loss_scale: Tensor | None,
    limit: float | None,
    each: bool = False,
    atomic: bool,
    found_inf: Tensor | None = None,
) -> Decision:
    """From the norms that were measured before anything is stepped.

    Args:
        late_scale: ``step(gradient_multiplier=...)``, 0-dim fp32.
        inverse_loss_scale: one over a loss scale, 0-dim fp32.
        limit: largest norm; None: no clipping. The coefficient is ``torch.nn.utils.clip_grad_norm_``'s.
        each: clip each parameter by its own norm.
        atomic: skip the step whole where the norm is not finite. So is a norm above 1.8e19 in any one parameter,
            before the loss scale is taken out: its square is not finite in fp32.
        found_inf: 0-dim; skip if it is not 0, for what somebody else has seen.
    """
    scale = late_scale
    if inverse_loss_scale is not None:
        scale = inverse_loss_scale if scale is None else scale * inverse_loss_scale
    norm = global_norm(norms_sq, reduce, scale)
    multiplier = scale
    if limit is not None:
        clipped = norms_sq.sqrt() * (1.0 if scale is None else scale.abs()) if each else norm
        coefficient = torch.clamp(limit / (clipped + 1e-6), max=1.0)
        multiplier = coefficient if scale is None else coefficient * scale
    if not atomic:
        return Decision(multiplier, norm, scale, None)
    if found_inf is not None:
        norm = torch.where(found_inf.to(norm.device) == 0, norm, torch.nan)
    finite = torch.isfinite(norm)
    taken = norm.new_ones(()) if multiplier is None else multiplier
    return Decision(torch.where(finite, taken, torch.nan), norm, scale, ~finite)
