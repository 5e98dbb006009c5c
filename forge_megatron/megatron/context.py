"""Causal attention over a sequence that is split over context-parallel ranks, without Transformer Engine.

Megatron cuts the sequence into ``2 * cp`` chunks and gives rank r the chunks r and ``2 * cp - 1 - r``, so that
every rank has the same share of the causal triangle. Three ways to attend over all of it:

- :func:`ulysses`: all-to-all, each rank attends over the whole sequence for ``1 / cp`` of the heads
  (Jacobs et al. 2023, "DeepSpeed Ulysses").
- :func:`gathered`: each rank gathers all keys and values and attends for its own queries; the gradients of keys and
  values are reduce-scattered (Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2).
- :func:`forge_megatron.megatron.ring.ring`: keys and values travel from rank to rank, and no rank has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def on_this_rank(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The two chunks of context rank ``rank``: what ``get_batch_on_this_cp_rank`` gives it.

    Args:
        whole: the sequence is dimension ``dim``, of a length that ``2 * size`` divides.

    Returns:
        A copy, ``1 / size`` as long.

    Raises:
        ValueError: the length is not divisible.
    """
    length = whole.shape[dim]
    if length % (2 * size):
        raise ValueError(
            f"a sequence of {length} over context_parallel_size={size}: it must be a multiple of {2 * size}"
        )
    chunks = whole.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def _in_order(by_rank: Tensor) -> Tensor:
    """``[cp, s / cp, ...]``, each rank's two chunks, to the sequence ``[s, ...]``."""
    first, second = by_rank.chunk(2, dim=1)
    return torch.cat((first, second.flip(0))).flatten(0, 1)


def _by_rank(sequence: Tensor, size: int) -> Tensor:
    """The inverse of :func:`_in_order`."""
    first, second = sequence.unflatten(0, (2 * size, -1)).chunk(2)
    return torch.cat((first, second.flip(0)), dim=1)


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float) -> Tensor:
    """Causal attention of the last ``sq`` tokens of a sequence of ``sk``.

    Args:
        query: ``[sq, b, heads, d]``.
        key: ``[sk, b, groups, d]``; ``value``: ``[sk, b, groups, dv]``. ``groups`` divides ``heads``.
        scale: of the scores; None: ``d ** -0.5``.
        dropout: of the probabilities.

    Returns:
        ``[sq, b, heads, dv]``.
    """
    grouped = query.shape[2] != key.shape[2]
    is_square = query.shape[0] == key.shape[0]
    out = scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (query, key, value)),
        attn_mask=None if is_square else causal_lower_right(query.shape[0], key.shape[0]),
        dropout_p=dropout,
        is_causal=is_square,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.permute(2, 0, 1, 3)


def _replicated(heads: Tensor, size: int) -> Tensor:
    """``[s, b, groups, d]`` with each head as often as it takes for ``size`` ranks to have equally many."""
    times = math.lcm(heads.shape[2], size) // heads.shape[2]
    return heads if times == 1 else heads.repeat_interleave(times, dim=2)


def _to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """``[s / cp, b, h, d]`` each to ``[s, b, h / cp, d]`` in one all-to-all."""
    size = group.size()
    parts = [t.unflatten(2, (size, -1)).flatten(3) for t in tensors]
    sent = torch.cat(parts, dim=3).permute(2, 0, 1, 3).contiguous()
    received = _in_order(all_to_all(group, sent))
    widths = [part.shape[3] for part in parts]
    return [part.unflatten(2, (-1, t.shape[3])) for part, t in zip(received.split(widths, dim=2), tensors, strict=True)]


def _to_sequence(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[s, b, h / cp, d]`` to ``[s / cp, b, h, d]``."""
    received = all_to_all(group, _by_rank(out, group.size()))
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def ulysses(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, *, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention by all-to-all over heads; a collective of ``group``.

    Key and value heads that ``cp`` does not divide are sent to every rank whose queries read them.

    Args:
        query: this rank's ``[s / cp, b, heads, d]``; ``cp`` divides ``heads``.
        key: ``[s / cp, b, groups, d]``; ``value``: ``[s / cp, b, groups, dv]``.
        group: the context-parallel group.
        scale, dropout: as :func:`attend`'s.

    Returns:
        ``[s / cp, b, heads, dv]``.
    """
    size = group.size()
    query, key, value = _to_heads((query, _replicated(key, size), _replicated(value, size)), group)
    return _to_sequence(attend(query, key, value, scale=scale, dropout=dropout), group)


def gathered(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, *, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention of this rank's queries over all keys and values; a collective of ``group``.

    Args, Returns: as :func:`ulysses`, for any number of heads.
    """
    size, rank = group.size(), group.rank()
    together = gather_from_sequence_parallel_region(torch.cat((key, value), dim=3), group=group)
    key, value = _in_order(together.unflatten(0, (size, -1))).split((key.shape[3], value.shape[3]), dim=3)
    length = query.shape[0] // 2
    parts = [
        attend(part, key[: chunk * length], value[: chunk * length], scale=scale, dropout=dropout)
        for part, chunk in zip(query.chunk(2), (rank + 1, 2 * size - rank), strict=True)
    ]
    return torch.cat(parts)
