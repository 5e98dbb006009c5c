"""This rank's part of a tensor that is sharded over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..formats import Origin
from .slot import Slot, of_codes


def is_sharded(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Its class is not imported: that takes longer than all of this package."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # with gradients on, a new view that autograd tracks
        return tensor.to_local()


def local_slot(slot: Slot) -> Slot:
    """The slot of this rank's part of a sharded weight, or of a weight's codes; any other slot itself."""
    if not is_sharded(slot.weight):
        return of_codes(slot)
    weight, known = local(slot.weight), slot.memo.get("local")
    # FSDP2 moves a shard at its first forward, and when weights are loaded.
    if known is None or known.weight is not weight:
        master = None if slot.master is None else local(slot.master)
        states, scales = tuple(map(local, slot.states)), tuple(map(local, slot.scales))
        known = replace(slot, weight=weight, states=states, scales=scales, master=master)
        slot.memo["local"] = known
    known.norm_sq, known.update_norm_sq = slot.norm_sq, slot.update_norm_sq
    return known


def shard_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """``whole``, which every rank has, as a DTensor placed as ``tensor`` is; nothing is communicated."""
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(tensor.device)
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def placed_as(tensor: Tensor, part: Tensor, shape: torch.Size) -> Tensor:
    """The DTensor of ``shape`` that is cut as ``tensor``, a DTensor, and of which this rank has ``part``."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def origin_of(name: str, tensor: Tensor) -> Origin:
    """The place of this rank's part in the whole weight, which decides its random bits.

    Raises:
        NotImplementedError: a part that is not of some rows and some columns of a matrix.
    """
    if not is_sharded(tensor):
        return Origin(name)
    last = tensor.dim() - 1
    cut = {placement.dim for placement in tensor.placements if not placement.is_replicate()}
    if not cut <= {0, last}:
        raise NotImplementedError(
            f"{name}: stochastic rounding of a weight placed as {tensor.placements} is not built yet; shard its first "
            "and its last dimension alone, or use recipe='fp32-master'"
        )
    if not cut:
        return Origin(name)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = offset[0] * tensor.shape[1:-1].numel() if last else 0
    return Origin(name, row=row, column=offset[last], columns=None if local(tensor).numel() else 1)
