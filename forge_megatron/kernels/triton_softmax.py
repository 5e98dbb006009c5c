"""A block of a head's softmax: one program a token for the normaliser, one a token and tile for the gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_language import TL_DTYPES, round_to

#: Logits that one program has in registers.
BLOCK = 2048
NUM_WARPS = 8


@triton.jit(do_not_specialize=["start"])
def normaliser_kernel(
    logits, stride, bias, targets, maximum, sum_exp, picked, total, start, columns, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    highest = tl.load(maximum + token)
    normaliser = tl.load(sum_exp + token)
    logit_sum = tl.load(total + token)
    target_logit = tl.load(picked + token)
    target = tl.load(targets + token) - start
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(row + column, mask=inside, other=0.0)
        if bias is not None:
            z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        logit_sum += tl.sum(tl.where(inside, z, 0.0))
        target_logit += tl.sum(tl.where(inside & (column == target), z, 0.0))
        z = tl.where(inside, z, -float("inf"))
        higher = tl.maximum(highest, tl.max(z))
        normaliser = normaliser * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher))
        highest = higher
    tl.store(maximum + token, highest)
    tl.store(sum_exp + token, normaliser)
    tl.store(total + token, logit_sum)
    tl.store(picked + token, target_logit)


@triton.jit(do_not_specialize=["start"])
def gradient_kernel(
    logits,
    stride,
    bias,
    targets,
    log_sum_exp,
    by_softmax,
    by_all,
    by_target,
    out,
    start,
    columns,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + token * stride + column, mask=inside, other=0.0)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + token) - start
    p = tl.exp(z - tl.load(log_sum_exp + token))
    g = p * tl.load(by_softmax + token) - tl.load(by_all + token)
    g -= tl.where(column == target, tl.load(by_target + token), 0.0)
    tl.store(out + token * columns + column, round_to(g, OUT), mask=inside)


def add(normaliser, logits: Tensor, bias: Tensor | None, start: int) -> None:
    tokens, columns = logits.shape
    if tokens:
        normaliser_kernel[(tokens,)](
            logits,
            logits.stride(0),
            bias,
            normaliser.targets,
            normaliser.maximum,
            normaliser.sum_exp,
            normaliser.picked,
            normaliser.total,
            start,
            columns,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def gradient(logits, bias, targets, log_sum_exp, weights, start: int, dtype: torch.dtype) -> Tensor:
    tokens, columns = logits.shape
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if tokens:
        gradient_kernel[(tokens, triton.cdiv(columns, BLOCK))](
            logits,
            logits.stride(0),
            bias,
            targets,
            log_sum_exp,
            *weights,
            out,
            start,
            columns,
            OUT=TL_DTYPES[dtype],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out
