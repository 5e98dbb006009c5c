"""Step counts: 0-dim fp32 on the CPU, as ``torch.optim`` keeps them, and many of them written or read in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A number would be made a tensor anew for each of them; with alpha, torch does not take this for one.
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def raise_counts(counts: Sequence[Tensor]) -> None:
    """Adds 1 to each."""
    if counts:
        torch._foreach_add_(list(counts), _ONE, alpha=1)


def read_counts(counts: Sequence[Tensor]) -> list[int]:
    """What they count to."""
    return torch.stack(list(counts)).int().tolist() if counts else []
