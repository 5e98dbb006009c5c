"""``waiting=False``: the last micro-batch of a window is added to the sum in registers and stepped in its backward."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge
from forge_megatron.coordinator import plan
from tests.cpu.test_attach_regimes import OPTIONS, expect_equal, reference
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
@pytest.mark.parametrize("tokens", [2, 40], ids=["factors", "accumulator"])
def test_the_last_micro_batch_is_stepped_in_its_backward(backend, tokens):
    pair = Pair(mlp(16, 24, 8), backend=backend, accumulation_steps=3, waiting=False)
    weights = [pair.model[0].weight, pair.model[2].weight]
    assert "micro-batch 3 of 3 in its backward" in str(pair.optimizer.coverage)
    for step in range(3):
        before = [weight.detach().clone() for weight in weights]
        for micro in range(3):
            assert all(map(torch.equal, before, weights))
            x = batch(tokens, 16, seed=3 * step + micro)
            pair.backward(lambda model, x=x: model(x).square().mean() / 3)
        assert not any(map(torch.equal, before, weights))
        assert not any(owned.factors for owned in pair.optimizer.owned.values())
        pair.close()
    pair.expect_equal()
    kept = {row.waits_as for row in pair.optimizer.coverage if row.fused}
    assert kept == {"factors" if tokens == 2 else "accumulator"}


@pytest.mark.parametrize("rule", OPTIONS)
def test_windows_equal_the_reference(rule):
    model = mlp(6, 9, 5, 4)
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, rule, accumulation_steps=2, waiting=False, **OPTIONS[rule])
    oracle = reference(rule, twin, optimizer)
    for seed in range(3):
        for one, its in ((model, optimizer), (twin, oracle)):
            for half in range(2):
                mean_square(batch(7, 6, seed=2 * seed + half))(one).backward()
            its.step()
            its.zero_grad()
    expect_equal(rule, model, twin, 3)


@backends
def test_windows_of_other_lengths(backend):
    """A shorter one waits for step(); a longer one is refused before anything has changed."""
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=3, waiting=False)
    for length in (3, 1, 2, 3):
        for micro in range(length):
            pair.backward(mean_square(batch(5, 6, seed=10 * length + micro)))
        before = snapshot(pair.model, pair.optimizer)
        if length == 3:
            with pytest.raises(RuntimeError, match=r"0\.weight: .* before step\(\)"):
                pair.model(batch(5, 6)).sum().backward()
            expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
        pair.close()
    pair.expect_equal()


class Uses(nn.Module):
    """One weight twice, one that a micro-batch leaves out, one that is read without its module, two in checkpoints."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.now_and_then, self.read = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant, self.not_reentrant = nn.Linear(6, 6), nn.Linear(6, 6)
        self.number = 0

    def forward(self, x):
        self.number += 1
        x = self.twice(torch.tanh(self.twice(x)))
        if self.number % 3:
            x = torch.tanh(self.now_and_then(x))
        if self.number % 2:
            x = torch.nn.functional.linear(x, self.read.weight)
        x = torch.tanh(self.read(x))
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        return checkpoint(self.not_reentrant, torch.tanh(x), use_reentrant=False)


@backends
def test_a_weight_whose_last_micro_batch_cannot_be_told_waits(backend):
    pair = Pair(Uses(), backend=backend, accumulation_steps=2, waiting=False)
    for step in range(4):
        for micro in range(2):
            pair.backward(mean_square(batch(5, 6, seed=2 * step + micro)))
        pair.close()
    pair.expect_equal()


def test_two_graphs_of_the_last_micro_batch():
    pair = Pair(mlp(6, 8, 4), accumulation_steps=2, waiting=False)
    for step in range(3):
        pair.backward(mean_square(batch(5, 6, seed=step)))
        for model, _ in pair.sides():
            first, second = (mean_square(batch(5, 6, seed=10 * step + half))(model) for half in (1, 2))
            first.backward()
            second.backward()
        pair.close()
    pair.expect_equal()


def test_a_bf16_sum():
    """The sum is rounded to bf16 once for each micro-batch but the last."""
    layer = nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(layer.weight)
    optimizer = forge.attach(
        layer, "sgd", lr=1.0, accumulation_steps=2, accumulation_dtype=torch.bfloat16, waiting=False
    )
    for gradient in (256.0, 1.0):
        x = torch.zeros(64, 64, dtype=torch.bfloat16)
        x[0] = gradient
        layer(x).sum().backward()
    assert layer.weight[0, 0] == torch.tensor(-257.0).bfloat16()
    optimizer.step()


def test_a_factor_that_was_overwritten_is_told_before_the_step():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=2, waiting=False)
    x = batch(2, 6).requires_grad_()
    h = x * 1.0
    model(h).sum().backward()
    before = snapshot(model, optimizer)
    with torch.no_grad():
        h.add_(1.0)
    with pytest.raises(RuntimeError, match=r"0\.weight: an activation .* was modified in place"):
        model(batch(2, 6)).sum().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_what_comes_too_late_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=2, waiting=False)
    for seed in range(2):
        mean_square(batch(5, 6, seed=seed))(model).backward()
    with pytest.raises(RuntimeError, match="attach with waiting=True"):
        optimizer.step(gradient_multiplier=0.5)
    with pytest.raises(RuntimeError, match="attach with clip_grad_norm= or waiting=True"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    with pytest.raises(NotImplementedError, match="waiting=False with accumulation_steps=2 over ranks"):
        plan(accumulation_steps=2, waiting=False, sharded=True)


def test_a_second_graph_of_the_last_micro_batch_may_run_twice():
    """Which of its backwards is the last nobody knows: all are summed, and ``step()`` makes the update."""
    model = mlp(6, 8, 4)
    other = copy.deepcopy(model)
    ours = forge.attach(model, "sgd", lr=0.1, accumulation_steps=2, waiting=False)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for net, optimizer in ((model, ours), (other, theirs)):
        net(batch(5, 6)).square().mean().backward()
        first, second = net(batch(3, 6, seed=1)).square().mean(), net(batch(4, 6, seed=2)).abs().mean()
        first.backward()
        second.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-7)
