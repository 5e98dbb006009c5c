"""Attention to one block of keys, with what it takes to put blocks together: the scores' log-sum-exp.

Softmax over all keys is the blocks' softmaxes, each weighted by its share of the sum of exponentials (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax"). So a block's backward needs nothing of the other
blocks but the output and the log-sum-exp over all of them (Dao et al. 2022, "FlashAttention", appendix B.4).

torch's flash kernels return the log-sum-exp; where they do not take the operands, the scores of some rows at a time
are written out, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

_ATEN = torch.ops.aten
# Query rows whose scores are written out at a time, where there is no kernel.
_ROWS = 512


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype's numbers are kept in: fp32, or fp64 for itself."""
    return torch.promote_types(dtype, torch.float32)


def forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of ``sq`` queries to ``sk`` keys alone.

    Args:
        query: ``[sq, b, heads, d]``.
        key: ``[sk, b, groups, d]``; ``value``: ``[sk, b, groups, dv]``. ``groups`` divides ``heads``.
        causal: query i sees the keys up to i, and ``sq == sk``; False: each sees all.
        scale: of the scores; None: ``d ** -0.5``.

    Returns:
        The output ``[sq, b, heads, dv]``, rounded by a kernel and else in fp32, and ``log(sum(exp(scores)))`` as
        ``[sq, b, heads]`` in fp32; both in fp64 of fp64.
    """
    query, key, value = _heads_first(query, key, value)
    if not _has_kernel(query, key, value, causal):
        out, lse = _written_out(query, key, value, causal, scale)
    elif query.is_cuda:
        out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    else:
        key, value = _for_each_head(query, key, value)
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's part of the gradients of a softmax over more keys than the block's.

    Args:
        dout: gradient of ``out``.
        query, key, value, causal, scale: as in :func:`forward`.
        out, lse: over all keys that these queries see, shaped as :func:`forward`'s.

    Returns:
        Gradients of ``query``, ``key`` and ``value``, shaped as they are; rounded by a kernel and else in fp32.
    """
    lse = lse.permute(1, 2, 0).contiguous()
    dout, query, key, value, out = _heads_first(dout, query, key, value, out)
    if not _has_kernel(query, key, value, causal):
        grads = _written_out_backward(dout, query, key, value, out, lse, causal, scale)
    elif query.is_cuda:
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the seeds of a dropout
        lengths = None, None, query.shape[2], key.shape[2]
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            dout, query, key, value, out, lse, *lengths, 0.0, causal, unused, unused, scale=scale
        )
    else:
        groups = key.shape[1]
        key, value = _for_each_head(query, key, value)
        dquery, *of_heads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        grads = dquery, *(_over_heads(grad, groups) for grad in of_heads)
    dquery, dkey, dvalue = (grad.permute(2, 0, 1, 3) for grad in grads)
    return dquery, dkey, dvalue


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.permute(1, 2, 0, 3) for t in tensors)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether torch has a flash kernel for these, all ``[b, heads, s, d]``."""
    width = query.shape[3]
    if width != value.shape[3]:
        return False
    if query.is_cuda:
        return width % 8 == 0 and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, causal, True))
    return query.device.type == "cpu"


def _for_each_head(query: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``[b, groups, s, d]`` with a head for each of the query's."""
    times = query.shape[1] // tensors[0].shape[1]
    return tensors if times == 1 else tuple(t.repeat_interleave(times, dim=1) for t in tensors)


def _over_heads(grad: Tensor, groups: int) -> Tensor:
    """The inverse's gradient: summed over the heads that read the same group."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, -1)).sum(2, dtype=wide(grad.dtype))


def _scores(query: Tensor, key: Tensor, first: int, causal: bool, scale: float | None) -> Tensor:
    """Of some rows of queries, the first of which is the block's row ``first``; what is not seen is minus infinity."""
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        scores.masked_fill_(future, -torch.inf)
    return scores


def _written_out(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None):
    key, value = (t.to(wide(t.dtype)) for t in _for_each_head(query, key, value))
    outs, sums = [], []
    for first in range(0, query.shape[2], _ROWS):
        scores = _scores(query[:, :, first : first + _ROWS].to(key.dtype), key, first, causal, scale)
        sums.append(scores.logsumexp(-1))
        outs.append((scores - sums[-1].unsqueeze(-1)).exp() @ value)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _written_out_backward(dout, query, key, value, out, lse, causal: bool, scale: float | None):
    groups = key.shape[1]
    key, value = (t.to(wide(t.dtype)) for t in _for_each_head(query, key, value))
    by = query.shape[3] ** -0.5 if scale is None else scale
    dquery, dkey, dvalue = [], torch.zeros_like(key), torch.zeros_like(value)
    for first in range(0, query.shape[2], _ROWS):
        rows, drows, orows = (t[:, :, first : first + _ROWS].to(key.dtype) for t in (query, dout, out))
        chances = (_scores(rows, key, first, causal, scale) - lse[:, :, first : first + _ROWS, None]).exp()
        dscores = chances * (drows @ value.mT - (drows * orows).sum(-1, keepdim=True)) * by
        dquery.append(dscores @ key)
        dkey += dscores.mT @ rows
        dvalue += chances.mT @ drows
    return torch.cat(dquery, dim=2), _over_heads(dkey, groups), _over_heads(dvalue, groups)
