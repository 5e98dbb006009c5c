"""torch.amp.GradScaler: unscaled before the update, skipped whole, and the scaler told, owned weights or not."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot

waiting_modes = pytest.mark.parametrize(
    "options",
    [{"skip": "atomic"}, {"waiting": True}, {"clip": 0.05}, {"accumulation_steps": 2}],
    ids=["atomic", "waiting", "clip", "accumulation"],
)


class Overflows(torch.autograd.Function):
    """Identity whose gradient is infinite in one place."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dy[0, 0] = math.inf
        return dy


def train_with_scalers(pair: Pair, losses, **scaling) -> list[tuple[float, float]]:
    """One step a loss on both sides; the two scales after each."""
    scalers = [torch.amp.GradScaler("cpu", **scaling) for _ in pair.sides()]
    micro_batches = pair.optimizer._plan.micro_batches or 1
    scales = []
    for loss in losses:
        for (model, optimizer), scaler in zip(pair.sides(), scalers, strict=True):
            for _ in range(micro_batches):
                scaler.scale(loss(model) / micro_batches).backward()
            if optimizer is pair.oracle and pair.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), pair.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(tuple(scaler.get_scale() for scaler in scalers))
    return scales


@backends
@waiting_modes
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "every_weight_owned"])
def test_trains_as_torch_does_with_one_overflow(backend, options, bias):  # field log rows 17, 85
    """The third of five steps overflows: the loss scale is halved once, and both sides skip the same step."""
    pair = Pair(mlp(6, 8, 4, bias=bias), backend=backend, **options)
    x = batch(5, 6)
    losses = [mean_square(x)] * 5
    losses[2] = lambda model: model[2](Overflows.apply(model[1](model[0](x)))).square().mean()
    scales = train_with_scalers(pair, losses, init_scale=2.0**16, growth_interval=2)
    assert [ours for ours, _ in scales] == [theirs for _, theirs in scales] == [2.0**k for k in (16, 17, 16, 16, 17)]
    pair.expect_equal(atol=1e-6)
    assert pair.optimizer.skipped_steps == 1
    assert all(state["step"] == 4 for state in pair.optimizer.state.values())


@backends
def test_an_overflow_that_only_an_owned_weight_sees(backend):
    """Its .grad does not exist and every .grad is finite: the scaler must be told nevertheless."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4))
    optimizer = forge.attach(model, "sgd", lr=1e-2, backend=backend, skip="atomic")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = snapshot(model, optimizer)
    scaler.scale(model[1](Overflows.apply(model[0](batch(5, 6)))).sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    expect_bit_equal(before, snapshot(model, optimizer))


def test_norms_are_without_the_loss_scale():
    pair = Pair(mlp(6, 8, 4), skip="atomic")
    pair.backward(mean_square(batch(5, 6)))
    norm = torch.nn.utils.get_total_norm([p.grad for p in pair.twin.parameters()])
    pair.optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0)
    scaler.scale(pair.model(batch(5, 6)).square().mean()).backward()
    scaler.step(pair.optimizer)
    torch.testing.assert_close(pair.optimizer.grad_norm, norm, rtol=1e-5, atol=0)
    for name, p in pair.twin.named_parameters():
        torch.testing.assert_close(pair.optimizer.gradient_norms[name], p.grad.norm(), rtol=1e-5, atol=0)


def test_one_scaler_for_two_optimizers():
    """An overflow in one skips that one; the scale is backed off for both."""
    halves = [mlp(6, 8), mlp(8, 4)]
    optimizers = [forge.attach(half, lr=1e-2, skip="atomic") for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(halves[1](Overflows.apply(halves[0](batch(5, 6)))).square().mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert [optimizer.skipped_steps for optimizer in optimizers] == [1, 0]


def test_a_disabled_scaler_steps():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(batch(5, 6)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[model[0].weight]["step"] == 1


def test_a_scaler_is_refused_where_weights_are_updated_in_backward():
    """Nothing tells backward that the loss is scaled: the first step() refuses, and every use after it."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(5, 6)).square().mean()).backward()
    before = snapshot(model, optimizer)
    message = r"GradScaler needs every update to wait .* skip='atomic'.* 0\.weight has been updated with a scaled"
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="scaled gradient"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="scaled gradient"):
        model(batch(5, 6)).square().mean().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_detached_optimizer_takes_a_scaler_as_torchs_does():
    pair = Pair(mlp(6, 8, 4))
    pair.optimizer.detach()
    losses = [mean_square(batch(5, 6)), lambda model: model(batch(5, 6)).sum() * math.inf, mean_square(batch(5, 6))]
    assert train_with_scalers(pair, losses, init_scale=2.0**10) == [(2.0**k, 2.0**k) for k in (10, 9, 9)]
    pair.expect_equal()


def test_unscale_is_refused_by_name():
    """It would unscale every .grad and leave out the owned weights."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, skip="atomic")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(5, 6)).square().mean()).backward()
    before = snapshot(model, optimizer)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\).*clip_grad_norm="):
        scaler.step(optimizer)
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_closure_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, skip="atomic")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(5, 6)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="a closure with GradScaler"):
        scaler.step(optimizer, lambda: None)


class TestTheProtocolOfAttributes:
    """``optimizer.grad_scale`` and ``optimizer.found_inf``, which torch sets where step() hides its parameters."""

    @staticmethod
    def hide(optimizer):
        step = optimizer.step
        optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)

    def test_unscales_and_skips(self):
        pair = Pair(mlp(6, 8, 4), skip="atomic")
        self.hide(pair.optimizer)
        losses = [mean_square(batch(5, 6)), lambda model: model(batch(5, 6)).sum() * math.inf, mean_square(batch(5, 6))]
        scales = train_with_scalers(pair, losses, init_scale=2.0**12)
        assert scales == [(2.0**k, 2.0**k) for k in (12, 11, 11)]
        pair.expect_equal()

    @pytest.mark.parametrize("bias", [True, False])
    def test_an_overflow_that_cannot_be_reported_is_an_error(self, bias):
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=bias))
        optimizer = forge.attach(model, lr=1e-2, skip="atomic")
        self.hide(optimizer)
        scaler = torch.amp.GradScaler("cpu")
        before = snapshot(model, optimizer)
        scaler.scale(model[1](Overflows.apply(model[0](batch(5, 6)))).sum()).backward()
        with pytest.raises(RuntimeError, match=r"hides that it takes grad_scaler="):
            scaler.step(optimizer)
        expect_bit_equal(before, snapshot(model, optimizer))


def test_torchs_advice_to_the_authors_of_optimizers_is_not_shown_to_users():
    script = """
import torch, forge_megatron
model = torch.nn.Linear(6, 4)
optimizer = forge_megatron.attach(model, lr=1e-3, skip="atomic")
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(torch.ones(5, 6)).sum()).backward()
scaler.step(optimizer)
scaler.update()
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert "GradScaler" not in done.stderr
