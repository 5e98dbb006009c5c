"""Linear interpolation as ``torch.lerp`` rounds it, which ``torch.optim``'s moving averages are."""

from __future__ import annotations

from .bind import torch_language as tl


def lerp(start, end, weight):
    """``start + weight (end - start)``, from the nearer of the two, of fp32 tiles and an fp32 scalar."""
    # A select of the operands instead takes more registers.
    return tl.where(tl.abs(weight) < 0.5, tl.fma(end - start, weight, start), tl.fma(end - start, weight - 1.0, end))
