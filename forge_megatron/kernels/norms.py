"""The sum of a launch's partial sums: at once, or for all launches of a window together.

A launch writes one partial sum of squares a tile, because an atomic addition would sum in another order on every
replica. Adding them up is a launch of its own, and a model has hundreds of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: ``(norm_sq, partials)`` of every launch whose partial sums have not been added up.
LateNorms = list[tuple[Tensor, Tensor]]


def add_up(norm_sq: Tensor, partials: Tensor, late: LateNorms | None) -> None:
    """Write the sum of ``partials`` to ``norm_sq``, or leave both to :func:`settle`."""
    if late is None:
        norm_sq.data.copy_(partials.sum(dtype=torch.float64))
    else:
        late.append((norm_sq, partials))


def settle(late: LateNorms) -> None:
    """Write every sum that is late, in one launch for many, and empty the list."""
    devices: dict[torch.device, LateNorms] = {}
    for norm_sq, partials in late:
        devices.setdefault(partials.device, []).append((norm_sq, partials))
    late.clear()
    for group in devices.values():
        norms, partials = zip(*group, strict=True)
        # The sum of what is not negative is its 1-norm, of which there is one launch for many tensors.
        torch._foreach_copy_([norm.data for norm in norms], torch._foreach_norm(list(partials), 1, torch.float64))
