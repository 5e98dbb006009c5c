"""The weights of a bucket in its buffer after their step, as each lies in memory: one that is stored as codes is
gathered as its codes and scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from forge_megatron.coordinator.bucket import ALIGNMENT, Bucket, Piece, extent, round_up, rows_of
from forge_megatron.formats import in_memory

Place = tuple[Piece, Tensor, Tensor]


def in_buffer(bucket: Bucket, buffer: Tensor, parts: int) -> tuple[Tensor, list[list[Place]]]:
    """What they take of a uint8 buffer, ``[parts, bytes]``, never more than the bucket's gradients and flags; and of
    each part, each piece, a tensor of its rows as it lies there, and in the weight. Kept until a weight moves.
    """
    lie = buffer.data_ptr(), *(in_memory(piece.param)[0].data_ptr() for piece in bucket.pieces)
    known = bucket.memo.get(lie[0])
    if known is None or known[0] != lie:
        length = sum(size for piece in bucket.pieces for size in _sizes(piece))
        weights = buffer[: parts * length].view(parts, length)
        found = [list(_places(bucket, stretch, parts, part)) for part, stretch in enumerate(weights)]
        known = bucket.memo[lie[0]] = lie, weights, found
    return known[1:]


def _places(bucket: Bucket, stretch: Tensor, parts: int, part: int) -> Iterator[Place]:
    start = 0
    for piece in bucket.pieces:
        rows = piece.rows(parts, part)
        for tensor, size in zip(in_memory(rows_of(piece.param, rows)), _sizes(piece), strict=True):
            held = stretch[start : start + tensor.nbytes].view(tensor.dtype)
            yield piece, held.view(tensor.shape), tensor
            start += size


def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """To the first from the second of each pair, in one launch a dtype; a rank may have no rows in a bucket."""
    of_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in pairs:
        of_dtype[source.dtype].append((target, source))
    for pairs in of_dtype.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _sizes(piece: Piece) -> list[int]:
    """Bytes of each tensor of a piece, in every part, with what aligns the next."""
    p = piece.param
    rows = piece.end - piece.first
    return [round_up(tensor.nbytes // extent(p) * rows, ALIGNMENT) for tensor in in_memory(p)]
