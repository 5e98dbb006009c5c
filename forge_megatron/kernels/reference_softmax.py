"""A block of a head's softmax in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add(normaliser, logits: Tensor, bias: Tensor | None, start: int) -> None:
    if bias is not None:
        logits += bias
    normaliser.total += logits.sum(1)
    here, column = _within(normaliser.targets, start, logits.shape[1])
    normaliser.picked += torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
    old = normaliser.maximum
    normaliser.maximum = torch.maximum(old, logits.amax(1))
    added = logits.sub_(normaliser.maximum[:, None]).exp_().sum(1)
    normaliser.sum_exp = normaliser.sum_exp * (old - normaliser.maximum).exp() + added


def gradient(logits, bias, targets, log_sum_exp, weights, start: int, dtype: torch.dtype) -> Tensor:
    by_softmax, by_all, by_target = weights
    if bias is not None:
        logits += bias
    logits.sub_(log_sum_exp[:, None]).exp_().mul_(by_softmax[:, None]).sub_(by_all[:, None])
    here, column = _within(targets, start, logits.shape[1])
    logits.scatter_add_(1, column[:, None], torch.where(here, -by_target, 0.0)[:, None])
    return logits.to(dtype)


def _within(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    column = targets - start
    return (column >= 0) & (column < width), column.clamp(0, width - 1)
