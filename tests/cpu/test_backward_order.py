"""The input gradient reads the weight from before its update, and a stale weight is an error."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
def test_input_gradient_is_that_of_the_old_weight(backend):
    layer = nn.Linear(6, 4)
    old = layer.weight.detach().clone()
    optimizer = forge.attach(layer, lr=10.0, backend=backend)
    x = batch(5, 6).requires_grad_()
    dy = batch(5, 4, seed=1)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ old, rtol=0, atol=1e-6)
    assert (layer.weight - old).abs().min() > 1.0
    assert layer.weight in optimizer.owned


@backends
def test_update_happens_inside_backward_and_bumps_the_version(backend):
    layer = nn.Linear(6, 4)
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    before, version = layer.weight.detach().clone(), layer.weight._version
    loss = layer(batch(5, 6)).square().mean()
    assert layer.weight._version == version
    loss.backward()
    assert layer.weight._version > version
    assert not torch.equal(layer.weight, before)
    assert layer.weight.grad is None
    after = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, after)


@backends
def test_an_ordinary_parameter_is_stepped_at_step(backend):
    layer = nn.Linear(6, 4)
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    before = layer.bias.detach().clone()
    layer(batch(5, 6)).square().mean().backward()
    assert torch.equal(layer.bias, before)
    optimizer.step()
    assert not torch.equal(layer.bias, before)


@backends
def test_a_graph_from_before_the_update_is_refused_before_anything_changes(backend):
    """The stale layer comes last in backward: the pre-flight must see it first."""
    model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)])
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6)
    stale = model[1](model[0](x)).square().mean()
    model[0](x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"^0\.weight: changed between its forward .* run the forward again"):
        stale.backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
@pytest.mark.parametrize("waiting", [False, True])
def test_a_weight_written_between_forward_and_backward_is_refused(backend, waiting):
    model = mlp(6, 5, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, waiting=waiting)
    loss = model(batch(5, 6)).square().mean()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"0\.weight: changed between its forward"):
        loss.backward()
    expect_bit_equal(before, snapshot(model, optimizer))
    # The error was raised before anything changed, so training goes on.
    optimizer.zero_grad()
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


@backends
def test_a_stale_weight_is_seen_where_autograds_own_check_is_off(backend):
    model = mlp(6, 5, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    with save_on_cpu():
        stale = model(batch(5, 6)).square().mean()
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"weight: changed between its forward"):
        stale.backward()


@backends
def test_activations_offloaded_to_the_cpu(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)

    def loss(model):
        with save_on_cpu():
            return model(x).square().mean()

    pair.train(loss, loss, loss)
    pair.expect_equal()


@backends
def test_a_weight_written_between_steps_is_trained_on_from_there(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    for _ in range(3):
        pair.train(mean_square(x))
        with torch.no_grad():
            for model, _ in pair.sides():
                model[0].weight.clamp_(-0.3, 0.3)
    pair.expect_equal()


@backends
def test_a_weight_written_between_its_update_and_step_is_refused(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)
    with pytest.raises(RuntimeError, match=r"2\.weight: was written after backward"):
        optimizer.step()


@backends
def test_a_weight_written_before_a_waiting_step_is_stepped_from_there(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    x = batch(5, 6)
    for _ in range(2):
        pair.backward(mean_square(x))
        with torch.no_grad():
            for model, _ in pair.sides():
                model[2].weight.clamp_(-0.1, 0.1)
        pair.close()
    pair.expect_equal()
