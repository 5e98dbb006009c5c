"""Attention of the last tokens of a sequence, which context-parallel ranks make, on the GPU's flash kernel."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")

from forge_megatron.megatron.context import attend


def _inputs(queries: int, keys: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((queries, 2, 8, d), (keys, 2, 2, d), (keys, 2, 2, d))
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-6)])
@pytest.mark.parametrize(("queries", "keys"), [(128, 512), (256, 256), (100, 300)])
@pytest.mark.parametrize("d", [64, 128])
def test_it_equals_the_formula_in_fp64(queries, keys, d, dtype, relative):
    inputs = _inputs(queries, keys, d, dtype)
    out = attend(*inputs, scale=None, dropout=0.0)
    dout = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, inputs, dout)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    query, key, value = exact[0], *(t.repeat_interleave(4, dim=2) for t in exact[1:])
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * d**-0.5
    future = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1 + keys - queries)
    expected = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)
    theirs = [expected, *torch.autograd.grad(expected, exact, dout.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() <= relative * b.norm()


def test_scores_are_never_whole():
    inputs = _inputs(2048, 16384, 128, torch.bfloat16)
    scores = 2 * 8 * 2048 * 16384 * 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(*inputs, scale=None, dropout=0.0)
    out.sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < scores / 2
