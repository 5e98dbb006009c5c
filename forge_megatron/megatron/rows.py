"""Optimizer states of which a data-parallel rank has some rows, in the shards of Megatron's checkpoints.

Each rank writes its rows of what the model's shard says of the whole weight, so that a checkpoint is the one of a run
that shards nothing, and any number of ranks reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor


def sharded_rows(
    weight: ShardedTensor | ShardedTensorFactory, held: Tensor, rows: slice, prefix: str, copy: int
) -> ShardedTensorFactory | LocalNonpersistentObject:
    """The checkpoint's entry of a state.

    Args:
        weight: of the model's sharded state dict, for the weight ``[O, ...]`` of this tensor-parallel rank, or for
            experts in one tensor ``[experts, O, I]``, which the checkpoint has as rows of ``[experts * O, I]``.
        held: the state, ``[rows, ...]``.
        rows: of the weight, those of ``held``.
        prefix: of the key.
        copy: which of the copies of the states it is of, from 0, of which the first is saved.

    Returns:
        What ``dist_checkpointing`` saves, and loads as ``[rows, ...]``; a rank without rows saves nothing.

    Raises:
        NotImplementedError: while saving, the weight is not saved as rows of it.
    """
    if rows.start == rows.stop:
        return LocalNonpersistentObject(held)
    # Saving a model reshapes its shards' tensors in place.
    weight, shape, held_shape = weight.without_data(), weight.data.shape, held.shape
    if len(shape) == 3:
        rows, held = slice(rows.start * shape[1], rows.stop * shape[1]), held.flatten(0, 1)

    def build(key: str, held: Tensor, replica_id, flattened_range) -> list[ShardedTensor]:
        if isinstance(weight, ShardedTensor):
            return [_narrowed(replace(weight, key=key), held, 0, rows, copy)]
        # Where each piece of the whole lies is read off tensors without memory.
        whole = torch.empty(shape, dtype=held.dtype, device="meta")
        pieces = nested_values(weight.build_fn(key, whole, replica_id, flattened_range))
        whole = whole.flatten(0, -2) if len(shape) == 3 else whole
        return [
            _narrowed(piece, held, start, rows, copy)
            for piece, start in _placed(key, whole, pieces)
            if start < rows.stop and start + piece.local_shape[0] > rows.start
        ]

    def merge(loaded: list[Tensor]) -> Tensor:
        return torch.cat([piece.reshape(-1, *held.shape[1:]) for piece in loaded]).view(held_shape)

    return ShardedTensorFactory(f"{prefix}.{weight.key}", held, build, merge, weight.replica_id)


def _placed(key: str, whole: Tensor, pieces: Iterable[ShardedTensor]) -> list[tuple[ShardedTensor, int]]:
    """Each of ``pieces``, views of ``whole``, and the row of it at which the piece begins."""
    width = whole[0].numel()
    placed = sorted(((piece, piece.data.storage_offset() // width) for piece in pieces), key=lambda pair: pair[1])
    end = 0
    for piece, start in placed:
        if start == end and piece.data.shape[1:] == whole.shape[1:]:
            end += piece.data.shape[0]
    if end != whole.shape[0]:
        raise NotImplementedError(
            f"{key}: its checkpoint is not made of whole rows, of which each data-parallel rank has some under "
            "use_distributed_optimizer; turn it off"
        )
    return placed


def _narrowed(piece: ShardedTensor, held: Tensor, start: int, rows: slice, copy: int) -> ShardedTensor:
    """``piece``, which begins at row ``start`` of the weight, with only those of its rows that are in ``rows``."""
    first, end = max(rows.start, start), min(rows.stop, start + piece.local_shape[0])
    # Megatron knows prepended axes only of shards of one size, and ranks' rows need not be equally many.
    data = held[first - rows.start : end - rows.start][(None,) * piece.prepend_axis_num]
    offset = list(piece.global_offset)
    offset[piece.prepend_axis_num] += first - start
    return replace(
        piece,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=0,
        # No rank of the same copy has these rows; without sharded states the last number counts data-parallel replicas.
        replica_id=(*piece.replica_id[:-1], copy),
    )
