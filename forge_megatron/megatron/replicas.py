"""A parameter that Megatron takes for a copy on every tensor-parallel rank must have one gradient there.

Megatron counts a parameter without the ``tensor_model_parallel`` attribute on the first rank only. A shard
that was never tagged (a head-wise bias, attention sinks) is then missing from the gradient norm, in silence,
and every weight is clipped by a wrong coefficient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Copies have equal bits unless a kernel of the backward adds with atomics.
_TOLERANCE = 1e-2


def expect_equal_replicas(named: dict[str, tuple[Tensor, Tensor | None]], tp_group: dist.ProcessGroup | None) -> None:
    """Compares the gradients of untagged parameters over tensor-parallel ranks; once, before the first step.

    Args:
        named: parameter name to (parameter, tensor that holds its ``.grad``, or the part of it that this rank steps;
            None: no part); the same on every rank.
        tp_group: the tensor-parallel group; None or one rank: nothing to compare.

    Raises:
        ValueError: names the parameters whose gradients differ, on every rank.
    """
    if tp_group is None or tp_group.size() == 1:
        return
    untagged = {
        name: None if held is None else held.grad
        for name, (parameter, held) in named.items()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    if not untagged:
        return
    device = next(iter(named.values()))[0].device
    norms = torch.stack([torch.zeros((), device=device) if g is None else g.float().norm() for g in untagged.values()])
    everywhere = norms.new_empty(tp_group.size() * len(untagged))
    dist.all_gather_into_tensor(everywhere, norms, group=tp_group)
    everywhere = everywhere.view(tp_group.size(), -1)
    low, high = everywhere.min(0).values, everywhere.max(0).values
    apart = (high - low > _TOLERANCE * high).tolist()
    unequal = [name for name, differs in zip(untagged, apart, strict=True) if differs]
    if unequal:
        raise ValueError(
            f"{', '.join(unequal)}: not tagged as tensor-parallel, but the gradients differ over tensor-parallel "
            "ranks, so the gradient norm would miss all shards but the first; call "
            "megatron.core.tensor_parallel.set_tensor_model_parallel_attributes on the parameter, or mark it "
            "sequence_parallel so that Megatron sums its gradient"
        )
