"""Inputs of any rank, stride and size, against nn.Linear."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mean_square, mlp

inputs = {
    "1d": lambda: batch(16),
    "2d": lambda: batch(3, 16),
    "4d": lambda: batch(2, 3, 4, 16),
    "transposed_3d": lambda: batch(2, 16, 9).transpose(1, 2),
    "transposed_2d": lambda: batch(16, 5).t(),
    "every_third": lambda: batch(5, 48)[:, ::3],
    "expanded": lambda: batch(1, 16).expand(7, 16),
    "broadcast_features": lambda: batch(7, 1).expand(7, 16),
    "a_view_of_much_more": lambda: batch(200, 16)[3:5],
    "one_token": lambda: batch(1, 16),
    "no_token": lambda: batch(0, 16),
    "no_token_3d": lambda: batch(2, 0, 16),
}


@backends
@pytest.mark.parametrize("waiting", [False, True], ids=["immediate", "waiting"])
@pytest.mark.parametrize("name", inputs)
def test_inputs_of_any_shape_and_stride(backend, waiting, name):  # field log rows 56, 58, 59
    x = inputs[name]()
    pair = Pair(nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)), backend=backend, waiting=waiting)
    grads = []
    for _ in range(2):
        for model, optimizer in pair.sides():
            leaf = x.detach().requires_grad_()
            y = model(leaf)
            assert y.shape == (*x.shape[:-1], 3)
            (y.square().sum() / 10).backward()
            grads.append(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()
    pair.expect_equal()
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(grads[2], grads[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["transposed_3d", "transposed_2d", "every_third", "expanded", "broadcast_features"])
def test_a_strided_input_gives_the_contiguous_ones_bits(name):  # field log row 56
    x = inputs[name]()
    results = []
    for operand in (x, x.contiguous()):
        torch.manual_seed(0)
        layer = nn.Linear(16, 5)
        optimizer = forge.attach(layer, lr=1e-3)
        layer(operand).square().sum().backward()
        optimizer.step()
        results.append((layer.weight.detach().clone(), optimizer.state[layer.weight]["exp_avg"].clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@backends
def test_an_output_gradient_that_is_not_contiguous(backend):  # field log row 55
    pair = Pair(nn.Linear(12, 6), backend=backend)
    x, c = batch(4, 5, 12), batch(5, 4, 6, seed=1)
    for _ in range(2):
        pair.train(lambda model: (model(x).transpose(0, 1) * c).sum())
    pair.expect_equal()


@backends
@pytest.mark.parametrize("reduce", ["sum", "mean", "first", "select"])
def test_output_gradients_of_any_stride(backend, reduce):
    """sum() expands one number; a slice pads with zeros."""
    pair = Pair(nn.Linear(12, 6), backend=backend)
    x = batch(4, 5, 12)
    pick = {
        "sum": lambda y: y.sum(),
        "mean": lambda y: y.mean(),
        "first": lambda y: y[:, 0].square().sum(),
        "select": lambda y: y[..., ::2].square().sum(),
    }[reduce]
    for _ in range(2):
        pair.train(lambda model: pick(model(x)))
    pair.expect_equal()


@backends
@pytest.mark.parametrize(
    ("widths", "tokens"), [((1, 1), 1), ((1, 7), 7), ((7, 1), 17), ((3, 33), 1), ((33, 3), 7), ((17, 19), 17)]
)
def test_odd_sizes(backend, widths, tokens):
    pair = Pair(mlp(*widths), backend=backend)
    x = batch(tokens, widths[0])
    pair.train(lambda model: model(x).pow(3).sum())
    pair.expect_equal()


@backends
@pytest.mark.parametrize("empty", ["first", "second", "both"])
def test_micro_batches_without_tokens(backend, empty):  # field log row 59
    """An empty micro-batch adds zero; a window of nothing else is a step with a zero gradient, as in torch."""
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=2, weight_decay=0.1)
    for _ in range(2):
        for micro in ("first", "second"):
            tokens = 0 if empty in (micro, "both") else 5
            x = batch(tokens, 6)
            pair.backward(lambda model, x=x: model(x).square().sum())
        pair.close()
    pair.expect_equal()
    assert all(state["step"] == 2 for state in pair.optimizer.state.values())


@backends
def test_a_batch_without_tokens_in_immediate_mode(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, weight_decay=0.1)
    pair.train(lambda model: model(batch(5, 6)).square().sum(), lambda model: model(batch(0, 6)).square().sum())
    pair.expect_equal()
    assert all(state["step"] == 2 for state in pair.optimizer.state.values())


@pytest.mark.parametrize("widths", [(0, 5), (5, 0)])
def test_a_layer_without_features(widths):
    with pytest.warns(UserWarning, match="zero-element"):
        layer = nn.Linear(*widths)
    pair = Pair(layer)
    pair.train(lambda model: model(batch(3, widths[0])).square().sum())
    pair.expect_equal()


def test_huge_and_tiny_gradients():
    """The state holds what fp32 holds; nothing is flushed or made infinite on the way."""
    for scale in (1e-12, 1e12):
        pair = Pair(mlp(6, 8), lr=1e-3)
        x = batch(5, 6)
        pair.train(lambda model, x=x, scale=scale: model(x).sum() * scale)
        for ours, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
            state, expected = pair.optimizer.state[ours], pair.oracle.state[theirs]
            torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-5, atol=0)


def test_the_loss_of_many_batch_shapes_in_one_run():
    pair = Pair(mlp(6, 8, 4))
    for tokens in (5, 1, 0, 17, 3):
        pair.train(lambda model, tokens=tokens: model(batch(tokens, 6)).square().sum())
    pair.expect_equal()
    pair.train(mean_square(batch(2, 6)))
    pair.expect_equal()
