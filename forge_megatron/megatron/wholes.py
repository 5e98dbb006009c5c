"""The whole weights of which tensor-parallel ranks have shards, for rules that read more than one coordinate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_megatron.coordinator import Part
from forge_megatron.formats import Origin
from forge_megatron.megatron.origins import origins


def wholes(
    model_chunks: Sequence[nn.Module], weights: Sequence[Tensor], group: dist.ProcessGroup
) -> dict[Tensor, Part]:
    """Those of ``weights``, all ``[O, I]``, that are shards; a collective of ``group``.

    The whole is laid out as on one rank, whatever its sharding: SwiGLU's gate rows before its up rows.

    Args:
        group: the tensor-parallel ranks of these weights.
    """
    if group.size() == 1:
        return {}
    members = [weight for weight in weights if getattr(weight, "tensor_model_parallel", False)]
    places = origins(model_chunks, members)
    everywhere: list[Mapping[str, tuple]] = [{}] * group.size()
    dist.all_gather_object(everywhere, {o.name: _stretches(p, o) for p, o in places.items()}, group=group)
    found = {}
    for p, origin in places.items():
        stretches = tuple(mine[origin.name] for mine in everywhere)
        shape = list(p.shape)
        shape[p.partition_dim] = max(end for each in stretches for _, end in each)
        found[p] = Part(torch.Size(shape), p.partition_dim, stretches, group.rank(), group)
    return found


def _stretches(p: Tensor, origin: Origin) -> tuple[tuple[int, int], ...]:
    extent = p.shape[p.partition_dim]
    first = origin.column if p.partition_dim else origin.row
    if p.partition_dim or origin.split >= extent:
        return ((first, first + extent),)
    second = first + origin.split + origin.jump
    return ((first, first + origin.split), (second, second + extent - origin.split))
