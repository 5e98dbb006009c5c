"""What other systems leave untrained, or train, without a word."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


class Block(nn.Module):
    """A GPT block: attention by hand, so that all four projections are linears, and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (h.view(b, t, self.heads, -1).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(h)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary=13, width=16, heads=2, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model, seed=0):
    ids = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", {}),
        ("reference", {"clip_grad_norm": 1.0}),
        ("reference", {"accumulation_steps": 2}),
        ("reference", {"recipe": "fp32-master"}),
        ("triton", {}),
        ("triton", {"clip_grad_norm": 1.0}),
    ],
)
def test_one_step_changes_every_parameter_of_a_gpt(backend, options):  # field log row 72
    model = GPT()
    with torch.no_grad():
        # Decay leaves a zero at zero, and a bias starts as one; a gradient moves it.
        for p in model.parameters():
            p.add_(0.01)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(options.get("accumulation_steps", 1)):
        next_token(model, seed).backward()
    optimizer.step()
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    assert all(optimizer.state[p]["exp_avg"].any() for p in model.parameters())


def test_a_gpt_trains_as_under_torch():
    """Against torch through three steps; a key's bias has a gradient of rounding alone and is left out."""
    model = GPT()
    for block in model.blocks:
        block.qkv.bias = None
    for clip in (None, 0.1):
        pair = Pair(copy.deepcopy(model), clip=clip)
        for seed in range(3):
            pair.train(lambda model, seed=seed: next_token(model, seed))
        pair.expect_equal(atol=3e-6)


@backends
def test_saliency_in_train_mode(backend):  # field log row 40
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=2)
    x = batch(5, 6).requires_grad_()
    pair.backward(mean_square(x))
    before = snapshot(pair.model, pair.optimizer)
    pending = [len(owned.factors.kept) for owned in pair.optimizer.owned.values()]
    ours, theirs = (torch.autograd.grad(model(x).square().sum(), x)[0] for model, _ in pair.sides())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert [len(owned.factors.kept) for owned in pair.optimizer.owned.values()] == pending
    pair.backward(mean_square(x))
    pair.close()
    pair.expect_equal()


@backends
def test_a_gradient_penalty_is_refused_before_anything_changes(backend):  # field log row 74
    model = mlp(6, 8, 1)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6).requires_grad_()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"2\.weight: create_graph=True .*; optimizer\.detach\(\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    expect_bit_equal(before, snapshot(model, optimizer))
    # The way out that the error names.
    twin = copy.deepcopy(model)
    optimizer.detach()
    for side in (model, twin):
        slope = torch.autograd.grad(side(x).sum(), x, create_graph=True)[0]
        ((slope.norm() - 1) ** 2).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None)
        if ours.grad is not None:
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("state", ["owned", "frozen", "paused", "plain"])
def test_a_gradient_penalty_through_a_head_with_its_loss_is_refused(state):  # field log row 74
    """Also where nothing is stepped: its gradient would lose its graph without a word."""
    model = mlp(6, 8, 11)
    optimizer = None if state == "plain" else forge.attach(model, lr=1e-2)
    model[2].requires_grad_(state != "frozen")
    x, targets = batch(5, 6).requires_grad_(), torch.arange(5)
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.paused() if state == "paused" else contextlib.nullcontext():
        loss = forge.vocab.linear_cross_entropy(model[:2](x), model[2], targets)
        with pytest.raises(RuntimeError, match=r"create_graph=True through linear_cross_entropy"):
            torch.autograd.grad(loss, x, create_graph=True)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("attached", [True, False])
def test_a_main_grad_of_another_library_is_left_alone(attached):  # field log row 71
    """Whether a gradient is fused is decided by attach, not by an attribute."""
    model = mlp(6, 8, 4)
    for p in model.parameters():
        p.main_grad = torch.full_like(p, 7.0)
        p.grad_added_to_main_grad = False
    twin = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3) if attached else torch.optim.AdamW(model.parameters(), lr=1e-3)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    for m, o in ((model, optimizer), (twin, oracle)):
        m(batch(5, 6)).square().mean().backward()
        assert attached or all(p.grad is not None for p in m.parameters())
        o.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert (ours.main_grad == 7.0).all()
        assert not ours.grad_added_to_main_grad


@backends
@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "grad"])
def test_evaluation_forwards(backend, context):  # field log row 84
    """Without gradients nothing is kept; with them eval() trains, as in torch."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    pair.train(mean_square(x))
    pair.model.eval(), pair.twin.eval()
    before = snapshot(pair.model, pair.optimizer)
    if context == "grad":
        pair.train(mean_square(x))
        assert pair.optimizer.state[pair.model[0].weight]["step"] == 2
    else:
        with getattr(torch, context)():
            y = pair.model(x)
        assert y.grad_fn is None
        assert not any(owned.live_uses() for owned in pair.optimizer.owned.values())
        expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.expect_equal()
    pair.model.train(), pair.twin.train()
    pair.train(mean_square(x))
    pair.expect_equal()


@backends
def test_evaluation_forwards_with_gradients_leave_no_memory(backend):  # field log row 84
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, backend=backend)
    for seed in range(50):
        model(batch(5, 6, seed=seed))
    assert all(len(owned.uses) == 0 for owned in optimizer.owned.values())
