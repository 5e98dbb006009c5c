"""Attention to blocks of keys on torch's flash kernel, put together as a ring's rank does it."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")

from forge_megatron.megatron import blocks
from forge_megatron.megatron.ring import _merge


# fp32, and values of another width, have no flash kernel.
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
@pytest.mark.parametrize(("groups", "d", "dv"), [(2, 128, 128), (8, 64, 64), (2, 64, 48)])
def test_two_blocks_are_the_formula_in_fp64(groups, d, dv, dtype, relative):
    torch.manual_seed(0)
    half = 320
    shapes = ((half, 2, 8, d), (2 * half, 2, groups, d), (2 * half, 2, groups, dv), (half, 2, 8, dv))
    query, key, value, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    cuts = [(True, slice(half, None)), (False, slice(half))]
    (out, lse), earlier = (blocks.forward(query, key[c], value[c], causal=causal, scale=None) for causal, c in cuts)
    out = out.float()
    _merge(out, lse, *earlier)
    (own, *last), (other, *first) = (
        blocks.backward(dout, query, key[c], value[c], out.to(dtype), lse, causal=causal, scale=None)
        for causal, c in cuts
    )
    ours = [out, own + other, *(torch.cat(pair) for pair in zip(first, last, strict=True))]

    exact = [t.double().requires_grad_() for t in (query, key, value)]
    keys, values = (t.repeat_interleave(8 // groups, dim=2) for t in exact[1:])
    scores = torch.einsum("sbhd,tbhd->bhst", exact[0], keys) * d**-0.5
    future = torch.ones(half, 2 * half, dtype=torch.bool, device="cuda").triu(1 + half)
    expected = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, -torch.inf).softmax(-1), values)
    theirs = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= relative * b.norm()


def test_scores_are_never_whole():
    queries, keys = 4096, 8192
    query = torch.randn(queries, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    key = value = torch.randn(keys, 2, 2, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = blocks.forward(query, key, value, causal=False, scale=None)
    blocks.backward(query, query, key, value, out, lse, causal=False, scale=None)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 * 8 * queries * keys * 2 / 4
