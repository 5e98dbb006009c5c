"""Causal attention over context-parallel ranks in a ring: keys and values travel, queries stay.

Liu et al. 2023, "Ring Attention with Blockwise Transformers". At each of ``cp`` hops a rank attends to the keys and
values of one rank while they go on to the next and those of the rank before arrive; no rank has more than two ranks'
of them. Outputs are put together by their log-sum-exp in fp32. In backward they travel once more, and the gradients
of keys and values behind them, in fp32, each sum to be rounded once, at home.

With Megatron's two chunks a rank (see :mod:`forge_megatron.megatron.context`) every block but a rank's own is either
seen whole or not at all, and every hop costs every rank the same: all queries with the first chunk of an earlier rank,
or the second half of the queries with both chunks of a later one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_megatron.megatron import blocks
from forge_megatron.megatron.blocks import wide


class _Hop:
    """A tensor on its way to the next rank of the ring, and the previous rank's on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent = sent  # the transfer reads it until it has been waited for
        self._received = torch.empty_like(sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _seen(rank: int, origin: int, half: int) -> tuple[slice, slice]:
    """Which of ``rank``'s queries see which of ``origin``'s keys, both in the order of their two chunks."""
    if origin < rank:
        return slice(None), slice(half)
    return slice(half if origin > rank else None, None), slice(None)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Another block's output into ``out [..., dv]`` and ``lse [...]``, in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), (block_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, scale: float | None):
        rank, size, half = group.rank(), group.size(), query.shape[0] // 2
        widths = key.shape[3], value.shape[3]
        own = together = torch.cat((key, value), dim=3)
        for hop in range(size):
            onward = _Hop(together, group) if hop + 1 < size else None
            origin = (rank - hop) % size
            rows, columns = _seen(rank, origin, half)
            of_block = blocks.forward(
                query[rows], *together[columns].split(widths, dim=3), causal=origin == rank, scale=scale
            )
            if hop == 0:
                out, lse = of_block[0].to(wide(query.dtype)), of_block[1]
            else:
                _merge(out[rows], lse[rows], *of_block)
            if onward is not None:
                together = onward.wait()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, own, out, lse)
        ctx.group, ctx.scale, ctx.widths = group, scale, widths
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        query, together, out, lse = ctx.saved_tensors
        group, widths = ctx.group, ctx.widths
        rank, size, half = group.rank(), group.size(), query.shape[0] // 2
        dquery = torch.zeros_like(query, dtype=wide(query.dtype))
        behind = None
        for hop in range(size):
            onward = _Hop(together, group) if hop + 1 < size else None
            origin = (rank - hop) % size
            rows, columns = _seen(rank, origin, half)
            of_query, *of_keys = blocks.backward(
                dout[rows],
                query[rows],
                *together[columns].split(widths, dim=3),
                out[rows],
                lse[rows],
                causal=origin == rank,
                scale=ctx.scale,
            )
            dquery[rows] += of_query
            gradient = torch.zeros_like(together, dtype=dquery.dtype) if behind is None else behind.wait()
            for part, of_part in zip(gradient[columns].split(widths, dim=3), of_keys, strict=True):
                part += of_part
            behind = _Hop(gradient, group)
            if onward is not None:
                together = onward.wait()
        dkey, dvalue = behind.wait().to(query.dtype).split(widths, dim=3)
        return dquery.to(query.dtype), dkey, dvalue, None, None


def expect_no_dropout(dropout: float) -> None:
    """Raises ``ValueError`` for a dropout above 0."""
    if dropout:
        raise ValueError(
            f"cp_comm_type='p2p': attention_dropout={dropout} needs every block's seeds in backward, which a ring does "
            "not keep; set it to 0, or use --cp-comm-type a2a or all_gather"
        )


def ring(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, *, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention of this rank's queries over all keys and values; every rank of ``group`` calls it.

    Args:
        query: this rank's two chunks, ``[s / cp, b, heads, d]``.
        key: ``[s / cp, b, groups, d]``; ``value``: ``[s / cp, b, groups, dv]``. ``groups`` divides ``heads``.
        group: the context-parallel group, of 2 ranks or more.
        scale: of the scores; None: ``d ** -0.5``.
        dropout: 0.

    Returns:
        ``[s / cp, b, heads, dv]``.

    Raises:
        ValueError: ``dropout`` above 0.
    """
    expect_no_dropout(dropout)
    return _Ring.apply(query, key, value, group, scale)
