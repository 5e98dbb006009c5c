"""requires_grad=False freezes an owned weight, and setting it back resumes."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp


@backends
def test_frozen_before_attach(backend, monkeypatch):
    model = mlp(6, 7, 8, 5, 4)
    frozen = model[2].weight
    frozen.requires_grad_(False)
    pair = Pair(model, backend=backend)
    stepped = []
    step = kernels.wgrad_step
    monkeypatch.setattr(kernels, "wgrad_step", lambda slot, *a, **k: (stepped.append(slot.weight), step(slot, *a, **k)))
    before = frozen.clone()
    x = batch(5, 6).requires_grad_()
    for _ in range(3):
        pair.train(mean_square(x))
    pair.expect_equal()
    assert torch.equal(frozen, before)
    assert frozen not in pair.optimizer.state
    assert all(weight is not frozen for weight in stepped)
    assert next(row for row in pair.optimizer.coverage if row.name == "2.weight").state_bytes == 0


@pytest.mark.parametrize("first", [True, False], ids=["frozen_at_attach", "frozen_later"])
@pytest.mark.parametrize("waiting", [False, True], ids=["immediate", "waiting"])
@pytest.mark.parametrize(("what", "backend"), [("weight", "reference"), ("bias", "reference"), ("weight", "triton")])
def test_frozen_for_some_steps(backend, first, what, waiting):
    """As torch.optim: state is kept while frozen, and its own step count goes on from there."""
    schedule = [False, False, True, True, False, True] if first else [True, False, False, True, False, True]
    model = mlp(6, 8, 4)
    getattr(model[0], what).requires_grad_(schedule[0])
    pair = Pair(model, backend=backend, waiting=waiting)
    x = batch(5, 6)
    for trainable in schedule:
        before = getattr(pair.model[0], what).detach().clone()
        for model, _ in pair.sides():
            getattr(model[0], what).requires_grad_(trainable)
        pair.train(mean_square(x))
        assert torch.equal(before, getattr(pair.model[0], what)) is not trainable
    pair.expect_equal()
    assert pair.optimizer.state[getattr(pair.model[0], what)]["step"] == sum(schedule)


@backends
def test_frozen_between_forward_and_backward(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    for model, optimizer in pair.sides():
        loss = model(x).square().mean()
        model[0].weight.requires_grad_(False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.requires_grad_(True)
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 0


@backends
def test_frozen_between_backward_and_a_waiting_step(backend):
    """torch steps whatever has a .grad."""
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    x = batch(5, 6)
    pair.backward(mean_square(x))
    for model, _ in pair.sides():
        model[0].weight.requires_grad_(False)
    pair.close()
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 1


@backends
def test_frozen_in_the_middle_of_an_accumulation_window(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=3)
    for micro, trainable in enumerate([True, False, True]):
        for model, _ in pair.sides():
            model[0].weight.requires_grad_(trainable)
        pair.backward(mean_square(batch(5, 6, seed=micro)))
    pair.close()
    pair.expect_equal()


@backends
def test_thawed_in_the_middle_of_a_clipped_window(backend):
    """It has the second micro-batch's gradient alone, and its norm counts."""
    model = mlp(6, 8, 8, 4)
    model[2].requires_grad_(False)
    pair = Pair(model, backend=backend, clip=0.05, accumulation_steps=2)
    for window in range(3):
        for micro in range(2):
            if window == micro == 1:
                for side, _ in pair.sides():
                    side[2].requires_grad_(True)
            pair.backward(mean_square(batch(5, 6, seed=window)))
        pair.close()
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
def test_everything_frozen_but_the_biases(backend):
    model = mlp(6, 8, 4)
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    pair = Pair(model, backend=backend)
    x = batch(5, 6)
    for _ in range(3):
        pair.train(mean_square(x))
    pair.expect_equal()


@backends
def test_progressive_unfreezing(backend):
    model = mlp(6, 7, 8, 4)
    for p in model.parameters():
        p.requires_grad_(False)
    for p in model[4].parameters():
        p.requires_grad_(True)
    pair = Pair(model, backend=backend)
    x = batch(5, 6)
    for index in (4, 2, 0):
        for side, _ in pair.sides():
            for p in side[index].parameters():
                p.requires_grad_(True)
        pair.train(mean_square(x))
        pair.train(mean_square(x))
    pair.expect_equal()
    assert [int(pair.optimizer.state[pair.model[i].weight]["step"]) for i in (4, 2, 0)] == [6, 4, 2]


class LowRank(nn.Module):
    """W x + B A x with W frozen and B zero at the start."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@backends
def test_low_rank_adapters_on_a_frozen_base(backend):  # field log row 42
    torch.manual_seed(0)
    model = nn.Sequential(LowRank(nn.Linear(12, 10), 8), nn.Tanh(), LowRank(nn.Linear(10, 4), 8))
    pair = Pair(model, backend=backend, weight_decay=0.1)
    x = batch(5, 12)
    start = [p.detach().clone() for p in pair.model.parameters()]
    pair.train(mean_square(x))
    for p, name in ((p, name) for name, p in pair.model.named_parameters() if name.endswith("a.weight")):
        index = [n for n, _ in pair.model.named_parameters()].index(name)
        torch.testing.assert_close(p, start[index] * (1 - 1e-3 * 0.1), rtol=0, atol=1e-8)
        assert torch.count_nonzero(pair.optimizer.state[p]["exp_avg"]) == 0
    after_one = [p.detach().clone() for p in pair.model.parameters()]
    pair.train(mean_square(x))
    pair.expect_equal()
    for (name, p), old in zip(pair.model.named_parameters(), after_one, strict=True):
        assert torch.equal(p, old) is ("base" in name), name


def test_states_exist_for_trainable_parameters_only():  # field log row 47
    model = mlp(32, 32, 32, 32, 32, bias=False)
    for layer in list(model)[:-1]:
        layer.requires_grad_(False)
    optimizer = forge.attach(model, lr=1e-3)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert optimizer.coverage.state_bytes == trainable * (4 + 4)
    model(batch(2, 32)).sum().backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert sum(t.numel() * t.element_size() for t in held) == trainable * 8


def test_frozen_parameters_in_a_checkpoint(tmp_path):
    def build(trainable):
        model = mlp(6, 8, 4)
        model[0].weight.requires_grad_(trainable)
        return model, forge.attach(model, lr=1e-2)

    model, optimizer = build(False)
    x = batch(5, 6)
    model(x).square().mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for trainable in (False, True):
        other, restored = build(trainable)
        restored.load_state_dict(saved)
        assert restored.state[other[2].weight]["step"] == 1
        assert (other[0].weight in restored.state) is trainable
    # A state that a checkpoint has is restored, though the parameter is frozen now.
    optimizer.zero_grad()
    model[0].weight.requires_grad_(True)
    model(x).square().mean().backward()
    optimizer.step()
    other, restored = build(False)
    restored.load_state_dict(optimizer.state_dict())
    expect_bit_equal(list(optimizer.state[model[0].weight].values()), list(restored.state[other[0].weight].values()))
