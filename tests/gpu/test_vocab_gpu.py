"""The embedding's and the head's kernels on the GPU, against fp64 and against whole logits."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import forge_megatron as forge
from forge_megatron.vocab import logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "width", "tokens"), [(50257, 768, 1024), (1000, 100, 7), (128256, 256, 4096)])
def test_an_embedding_by_sgd_equals_fp64(dtype, vocabulary, width, tokens):
    """A learning rate of 1 leaves the gradient in the difference of the weights; hot, repeated and absent ids."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(vocabulary, width, padding_idx=3, device="cuda", dtype=torch.float32)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = forge.attach(embedding, "sgd", lr=1.0)
    ids = torch.randint(vocabulary, (tokens,), device="cuda")
    ids[: tokens // 2] = 5
    ids[-2:] = torch.tensor([3, vocabulary - 1])
    gradient = torch.randn(tokens, width, device="cuda").to(dtype).float()
    embedding(ids).backward(gradient)
    optimizer.step()
    want = torch.zeros(vocabulary, width, dtype=torch.float64)
    want.index_add_(0, ids.cpu(), gradient.double().cpu())
    want[3] = 0
    bound = 4 * torch.finfo(torch.float32).eps * want.abs().max().item() * max(1, tokens / 64)
    gap = (embedding.weight.detach().cpu().double() + want).abs().max().item()
    assert gap <= bound, f"off by {gap}, {bound} is allowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 25, 1 << 20])
def test_the_head_equals_whole_logits_in_fp64(dtype, block, monkeypatch):
    monkeypatch.setattr(logits, "BLOCK_LOGITS", block)
    torch.manual_seed(0)
    vocabulary, width, tokens = 32003, 512, 700
    head = torch.nn.Linear(width, vocabulary, device="cuda", dtype=dtype)
    weight, bias = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    optimizer = forge.attach(head, "sgd", lr=1.0, recipe=None if dtype is torch.float32 else "fp32-master")
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    targets[::7] = -100
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(tokens, device="cuda")
    options = {"label_smoothing": 0.1, "reduction": "none"}
    losses = forge.vocab.linear_cross_entropy(hidden, head, targets, z_loss=1e-2, **options)
    losses.backward(upstream)
    optimizer.step()
    exact = hidden.detach().double().requires_grad_()
    z = F.linear(exact, weight, bias)
    want = F.cross_entropy(z, targets, **options) + 1e-2 * torch.where(targets < 0, 0.0, z.logsumexp(-1) ** 2)
    want.backward(upstream.double())
    theirs = hidden.detach().clone().requires_grad_()
    logits_of = F.linear(theirs, weight.detach().to(dtype), bias.detach().to(dtype)).float()
    theirs_loss = F.cross_entropy(logits_of, targets, **options)
    theirs_loss = theirs_loss + 1e-2 * torch.where(targets < 0, 0.0, logits_of.logsumexp(-1) ** 2)
    theirs_loss.backward(upstream)
    # Sums over a vocabulary of 32003 in fp32: at most twice what torch's own order of them is off by.
    torchs = {"hidden.grad": (theirs.grad.double() - exact.grad).abs().max().item()}
    eps = torch.finfo(dtype).eps if dtype is not torch.float32 else 32 * torch.finfo(dtype).eps
    stepped = head.weight if dtype is torch.float32 else optimizer.state[head.weight]["master"]
    for name, got, expected in (
        ("loss", losses, want),
        ("hidden.grad", hidden.grad, exact.grad),
        ("bias.grad", head.bias.grad, bias.grad),
        ("weight", stepped, weight - weight.grad),
    ):
        gap = (got.detach().double() - expected.detach()).abs().max().item()
        bound = max(eps * expected.abs().max().item(), 2 * torchs.get(name, 0.0))
        assert gap <= bound, f"{name}: off by {gap}, {bound} is allowed"
