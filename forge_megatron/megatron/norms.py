"""The norm of all gradients of an optimizer, formed on the device.

Megatron's own, without Transformer Engine and Apex, reads one number of each tensor on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def grad_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of ``gradients`` over the ranks of ``group``, 0-dim fp64 on ``device``; the host reads nothing.

    Args:
        gradients: each counted once over all ranks; norms of single tensors are summed up in fp32, their squares in
            fp64.
        group: where it is one rank nothing is sent.
        device: of the gradients, of which there may be none.
    """
    squared = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)
        squared = torch.stack(norms).double().square().sum()
    if group.size() > 1:
        dist.all_reduce(squared, group=group)
    return squared.sqrt()
