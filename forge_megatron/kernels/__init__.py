"""The fused weight-gradient and optimizer kernels, and the step of materialised gradients."""

from .api import step, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from .backend import resolve_backend
from .choice import choose
from .slot import Segment, Slot

__all__ = [
    "Segment",
    "Slot",
    "choose",
    "resolve_backend",
    "step",
    "wgrad_accumulate",
    "wgrad_norm_sq",
    "wgrad_step",
]
