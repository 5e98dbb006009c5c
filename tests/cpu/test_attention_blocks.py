"""Attention to blocks of keys, put together, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from forge_megatron.megatron import blocks

HALF = 7


def _formula(query, key, value, scale):
    """Queries are the second half of a sequence, of which all have the keys; ``[s, b, heads, d]``."""
    times = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(times, dim=2) for t in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    future = torch.ones(HALF, 2 * HALF, dtype=torch.bool).triu(HALF + 1)
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("dv", [8, 6])  # torch has no kernel for values of another width
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_two_blocks_are_the_whole(monkeypatch, groups, dv, dtype, bound):
    monkeypatch.setattr(blocks, "_ROWS", 3)
    generator = torch.Generator().manual_seed(1)
    shapes = ((HALF, 2, 4, 8), (2 * HALF, 2, groups, 8), (2 * HALF, 2, groups, dv), (HALF, 2, 4, dv))
    *inputs, dout = (torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes)
    exact = [t.double().requires_grad_() for t in inputs]
    whole = _formula(*exact, 0.3)
    theirs = torch.autograd.grad(whole, exact, dout.double())

    query, key, value = inputs
    parts = [(False, slice(HALF)), (True, slice(HALF, None))]
    found = [blocks.forward(query, key[cut], value[cut], causal=causal, scale=0.3) for causal, cut in parts]
    lse = torch.logaddexp(found[0][1], found[1][1])
    out = sum(part * (its - lse).exp().unsqueeze(-1) for part, its in found)
    assert (out - whole).abs().max() < bound

    grads = [
        blocks.backward(dout, query, key[cut], value[cut], out, lse, causal=causal, scale=0.3) for causal, cut in parts
    ]
    (first, *seen), (second, *own) = grads
    ours = [first + second, *(torch.cat(pair) for pair in zip(seen, own, strict=True))]
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype is dtype
        assert (mine - right).abs().max() < 5 * bound
