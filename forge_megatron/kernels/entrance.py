"""What holds inside every kernel: no autograd, no autocast."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch


def without_autocast(device_type: str):
    """A context that an enclosing autocast region does not reach into."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    # Entering and leaving autocast costs as much as a small GEMM's launch.
    return nullcontext()


def entrance(kernel):
    """``no_grad``, and fp32 sums where ``step()`` or ``backward()`` is called inside an autocast region."""

    @functools.wraps(kernel)
    def entered(*args, **kwargs):
        if not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled()):
            # As inside a backward: entering and leaving contexts takes as long as everything else here.
            return kernel(*args, **kwargs)
        with torch.no_grad(), without_autocast("cpu"), without_autocast("cuda"):
            return kernel(*args, **kwargs)

    return entered
