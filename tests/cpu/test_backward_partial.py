"""A backward that does not ask for a weight's gradient leaves the weight, its state and its window alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot

waiting = pytest.mark.parametrize("waiting", [False, True], ids=["immediate", "waiting"])


def nothing_pending(optimizer):
    return not any(owned.factors or owned.updated for owned in optimizer.owned.values())


@backends
@waiting
def test_saliency_by_autograd_grad(backend, waiting):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=waiting)
    x = batch(5, 6).requires_grad_()
    before = snapshot(pair.model, pair.optimizer)
    ours, theirs = (torch.autograd.grad(model(x).square().mean(), x)[0] for model, _ in pair.sides())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert nothing_pending(pair.optimizer)
    for _ in range(2):
        pair.train(mean_square(x))
    pair.expect_equal()


@backends
@waiting
def test_saliency_inside_a_window(backend, waiting):
    """Between the forward and the backward of the step, on the same graph and on another."""
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=waiting)
    x = batch(5, 6).requires_grad_()
    for _ in range(3):
        for model, optimizer in pair.sides():
            loss = model(x).square().mean()
            torch.autograd.grad(loss, x, retain_graph=True)
            torch.autograd.grad(model(x).sum(), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.expect_equal()


@backends
@waiting
def test_backward_with_inputs(backend, waiting):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, waiting=waiting)
    x = batch(5, 6).requires_grad_()
    before = snapshot(model, optimizer)
    model(x).square().mean().backward(inputs=[x])
    assert x.grad.abs().sum() > 0
    expect_bit_equal(before, snapshot(model, optimizer))
    assert nothing_pending(optimizer)
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_the_gradient_of_an_ordinary_parameter_by_autograd_grad(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    before = snapshot(pair.model, pair.optimizer)
    ours, theirs = (torch.autograd.grad(model(x).square().mean(), model[0].bias)[0] for model, _ in pair.sides())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))


@backends
def test_backward_with_the_models_parameters_as_inputs_is_refused(backend):
    """An owned weight is not in the graph: the biases would be trained and the weights silently not."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"weight: .*backward\(inputs=\.\.\.\) cannot ask"):
        model(batch(5, 6)).square().mean().backward(inputs=list(model.parameters()))
    expect_bit_equal(before, snapshot(model, optimizer))


def test_backward_with_only_owned_weights_as_inputs_is_noticed_at_step():
    model = mlp(6, 8, 4, bias=False)
    optimizer = forge.attach(model, lr=1e-2)
    loss = model(batch(5, 6)).square().mean()
    loss.backward(inputs=list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"0\.weight: .*no backward has asked"):
        optimizer.step()


def test_owned_weights_as_inputs_are_noticed_in_every_window():
    model = mlp(6, 8, 4, bias=False)
    optimizer = forge.attach(model, lr=1e-2)
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    x = batch(5, 6).requires_grad_()
    for inputs in ([model[0].weight], [x, *model.parameters()]):
        loss = model(x).square().mean()
        loss.backward(inputs=inputs)
        with pytest.raises(RuntimeError, match=r"0\.weight: .*no backward has asked"):
            optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))


class TiedThenPlain(nn.Module):
    """A weight that is read with and without its module, then another owned weight."""

    def __init__(self):
        super().__init__()
        self.tied, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.tied(torch.tanh(F.linear(x, self.tied.weight)))))


def test_every_weight_that_a_backward_leaves_out_is_looked_at():
    """Not only the last one: the others' plain part would be returned as if it were all."""
    model = TiedThenPlain()
    optimizer = forge.attach(model, lr=1e-2)
    y = model(batch(5, 6)).square().mean()
    with pytest.raises(RuntimeError, match=r"^tied\.weight: autograd\.grad"):
        torch.autograd.grad(y, model.tied.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^tied\.weight: autograd\.grad"):
        y.backward(inputs=[model.tied.weight])
    assert model.tied.weight.grad is None
    assert nothing_pending(optimizer)


@backends
def test_the_partial_gradient_of_a_tied_weight_is_refused(backend):
    """autograd.grad would see the plain consumer's part only."""
    layer = nn.Linear(6, 6)
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    y = layer(torch.tanh(F.linear(batch(5, 6), layer.weight))).square().mean()
    with pytest.raises(RuntimeError, match=r"^weight: autograd\.grad"):
        torch.autograd.grad(y, layer.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^weight: autograd\.grad"):
        y.backward(inputs=[layer.weight])
    assert nothing_pending(optimizer)


def test_the_gradient_of_an_owned_weight_by_autograd_grad_is_refused():
    layer = nn.Linear(6, 6)
    optimizer = forge.attach(layer, lr=1e-2)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(layer(batch(5, 6)).sum(), layer.weight)
    assert nothing_pending(optimizer)


@backends
@waiting
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_changes_and_keeps_nothing(backend, waiting, context):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=waiting)
    x = batch(5, 6)
    pair.train(mean_square(x))
    before = snapshot(pair.model, pair.optimizer)
    for mode in (True, False):
        pair.model.train(mode)
        with context():
            torch.testing.assert_close(pair.model(x), pair.twin(x), rtol=0, atol=1e-6)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert nothing_pending(pair.optimizer)
    pair.train(mean_square(x))
    pair.expect_equal()


@backends
def test_evaluation_between_forward_and_backward_and_between_backward_and_step(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        for model, optimizer in pair.sides():
            loss = model(x).square().mean()
            with torch.no_grad():
                model(x)
            loss.backward()
            with torch.inference_mode():
                model(x)
            optimizer.step()
            optimizer.zero_grad()
    pair.expect_equal()
    assert all(owned.weight.grad is None for owned in pair.optimizer.owned.values())


@backends
def test_a_backward_in_eval_mode_trains_as_in_torch(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    pair.model.eval(), pair.twin.eval()
    x = batch(5, 6)
    pair.train(mean_square(x))
    pair.expect_equal()


@backends
def test_a_jacobian_leaves_the_model_alone(backend):
    model = mlp(4, 5, 3)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    before = snapshot(model, optimizer)
    x = batch(4)
    jacobian = torch.autograd.functional.jacobian(model, x)
    rows = [torch.autograd.grad(model(x.requires_grad_())[i], x)[0] for i in range(3)]
    torch.testing.assert_close(jacobian, torch.stack(rows), rtol=0, atol=1e-7)
    expect_bit_equal(before, snapshot(model, optimizer))
    assert nothing_pending(optimizer)


@backends
def test_a_jacobian_by_batched_gradients(backend):
    pair = Pair(mlp(4, 5, 3), backend=backend)
    x = batch(2, 4).requires_grad_()
    eye = torch.eye(3).unsqueeze(1).expand(3, 2, 3)
    ours, theirs = (
        torch.autograd.grad(model(x), x, grad_outputs=eye, is_grads_batched=True)[0] for model, _ in pair.sides()
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    assert nothing_pending(pair.optimizer)


def test_functional_transforms_are_refused_by_torch():
    layer = nn.Linear(4, 3)
    optimizer = forge.attach(layer, lr=1e-2)
    before = snapshot(layer, optimizer)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: layer(x).sum())(batch(4))
    expect_bit_equal(before, snapshot(layer, optimizer))
