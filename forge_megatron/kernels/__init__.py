"""The fused weight-gradient and optimizer kernels, and the step of materialised gradients."""

from .api import step, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from .backend import resolve_backend
from .choice import choose
from .lookups import of_rows
from .slot import Segment, Slot

__all__ = [
    "Segment",
    "Slot",
    "choose",
    "of_rows",
    "resolve_backend",
    "step",
    "wgrad",
    "wgrad_accumulate",
    "wgrad_norm_sq",
    "wgrad_step",
]
