"""The fused weight-gradient and optimizer kernels, and the step of materialised gradients."""

from .api import step, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_step, wgrad_steps
from .backend import resolve_backend
from .blocks import FormedRows, of_rows
from .choice import choose
from .slot import Segment, Slot
from .softmax import Normaliser, logit_gradient
from .staged import stacks

__all__ = [
    "FormedRows",
    "Normaliser",
    "Segment",
    "Slot",
    "choose",
    "logit_gradient",
    "of_rows",
    "resolve_backend",
    "stacks",
    "step",
    "wgrad",
    "wgrad_accumulate",
    "wgrad_norm_sq",
    "wgrad_step",
    "wgrad_steps",
]
