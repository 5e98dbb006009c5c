"""Causal attention from its formula: what every way to split it over ranks must equal."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal softmax attention ``[s, b, heads, dv]``; a query head reads the key of its group."""
    times = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(times, dim=2) for t in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * (scale or query.shape[3] ** -0.5)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def operands(dtype: torch.dtype, length: int, heads: int, groups: int, d: int, dv: int) -> list[Tensor]:
    """Query, key, value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, d), (groups, d), (groups, dv), (heads, dv))
    drawn = [torch.randn(length, 2, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [*(t.requires_grad_() for t in drawn[:3]), drawn[3]]
