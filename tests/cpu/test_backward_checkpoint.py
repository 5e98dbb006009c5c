"""Checkpointed blocks, reentrant or not: one update, from all uses, by the old weight."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mlp

both = pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])


def leaf(*shape):
    """A reentrant checkpoint needs an input that requires grad."""
    return batch(*shape).requires_grad_()


@both
@pytest.mark.parametrize(("training", "backend"), [(True, "reference"), (False, "reference"), (True, "triton")])
def test_a_checkpointed_stack(backend, reentrant, training):
    pair = Pair(mlp(6, 8, 8, 4), backend=backend)
    pair.model.train(training), pair.twin.train(training)
    x = leaf(5, 6)
    for _ in range(2):
        pair.train(lambda model: checkpoint(model, x, use_reentrant=reentrant).square().mean())
    pair.expect_equal()


class ReadOutside(nn.Module):
    """Its first weight is read by a function outside the checkpointed block that calls its module."""

    def __init__(self):
        super().__init__()
        self.shared, self.before = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, reentrant):
        h = F.linear(self.before(x), self.shared.weight)
        return checkpoint(lambda h: self.shared(torch.tanh(h)), h, use_reentrant=reentrant)


@backends
@both
def test_a_function_outside_the_block_reads_the_weight_too(backend, reentrant):
    """A reentrant block's own backward ends before the function's has begun."""
    pair = Pair(ReadOutside(), backend=backend)
    for _ in range(3):
        pair.train(lambda model: model(leaf(5, 6), reentrant).square().mean())
    pair.expect_equal()


@backends
@both
def test_without_anything_else_a_checkpointed_weight_is_updated_in_backward(backend, reentrant):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    before = model[0].weight.detach().clone()
    checkpoint(model, leaf(5, 6), use_reentrant=reentrant).square().mean().backward()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.owned[model[0].weight].updated


@both
@pytest.mark.parametrize(
    ("checkpointed", "training", "backend"),
    [
        *itertools.product(["first", "second", "both"], [True, False], ["reference"]),
        ("first", True, "triton"),
        ("both", False, "triton"),
    ],
)
def test_a_layer_that_is_shared_with_a_plain_call(backend, reentrant, training, checkpointed):
    pair = Pair(mlp(6, 6), backend=backend)
    pair.model.train(training), pair.twin.train(training)
    x = leaf(5, 6)

    def call(model, h, name):
        if checkpointed in (name, "both"):
            return checkpoint(model, h, use_reentrant=reentrant)
        return model(h)

    for _ in range(2):
        pair.train(lambda model: call(model, torch.tanh(call(model, x, "first")), "second").square().mean())
    pair.expect_equal()


@backends
@both
def test_a_layer_that_is_called_twice_inside_one_block(backend, reentrant):
    pair = Pair(mlp(6, 6), backend=backend)
    x = leaf(5, 6)
    for _ in range(2):
        pair.train(
            lambda model: checkpoint(lambda h: model(torch.tanh(model(h))), x, use_reentrant=reentrant).square().mean()
        )
    pair.expect_equal()


@backends
@both
def test_nested_blocks(backend, reentrant):
    pair = Pair(mlp(6, 6, 6, 6), backend=backend)
    x = leaf(5, 6)

    def outer(model, h):
        inner = checkpoint(lambda h: model[2](torch.tanh(model[0](h))), h, use_reentrant=reentrant)
        # model[0] again: once in the inner block and once in the outer.
        return model[4](torch.tanh(model[0](torch.tanh(inner))))

    for _ in range(2):
        pair.train(lambda model: checkpoint(outer, model, x, use_reentrant=reentrant).square().mean())
    pair.expect_equal()


@backends
def test_a_reentrant_block_inside_a_non_reentrant_one(backend):
    pair = Pair(mlp(6, 6, 6), backend=backend)
    x = leaf(5, 6)

    def outer(model, h):
        return checkpoint(model, model(h), use_reentrant=True)

    for _ in range(2):
        pair.train(lambda model: checkpoint(outer, model, x, use_reentrant=False).square().mean())
    pair.expect_equal()


@backends
@both
def test_zero_grad_between_a_checkpointed_forward_and_its_backward(backend, reentrant):
    pair = Pair(mlp(6, 6), backend=backend)
    x = leaf(5, 6)
    for _ in range(2):
        for model, optimizer in pair.sides():
            loss = model(torch.tanh(checkpoint(model, x, use_reentrant=reentrant))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pair.expect_equal()


@backends
@both
def test_a_checkpointed_forward_whose_backward_never_comes(backend, reentrant):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = leaf(5, 6)
    for model, _ in pair.sides():
        checkpoint(model, x, use_reentrant=reentrant)
    for _ in range(2):
        pair.train(lambda model: checkpoint(model, x, use_reentrant=reentrant).square().mean())
    pair.expect_equal()
    # What it left behind ended with the next step: the weight does not wait for ever.
    pair.backward(lambda model: checkpoint(model, x, use_reentrant=reentrant).square().mean())
    assert pair.optimizer.owned[pair.model[0].weight].updated


@backends
@both
def test_accumulation_over_checkpointed_micro_batches(backend, reentrant):
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=3)
    for step in range(2):
        for micro in range(3):
            x = batch(5, 6, seed=3 * step + micro).requires_grad_()
            pair.backward(lambda model, x=x: checkpoint(model, x, use_reentrant=reentrant).square().mean() / 3)
        pair.close()
    pair.expect_equal()


@both
def test_checkpoint_sequential(reentrant):
    pair = Pair(mlp(6, 8, 8, 8, 4))
    x = leaf(5, 6)
    for _ in range(2):
        pair.train(lambda model: checkpoint_sequential(model, 3, x, use_reentrant=reentrant).square().mean())
    pair.expect_equal()


@both
def test_dropout_is_replayed(reentrant):
    torch.manual_seed(0)
    pair = Pair(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4)))
    x = leaf(5, 6)

    def loss(model):
        torch.manual_seed(1)
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    pair.train(loss, loss)
    pair.expect_equal()


def test_evaluation_under_no_grad_makes_no_weight_wait():
    """Only a forward inside an autograd function is one whose graph comes later."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    with torch.no_grad():
        model(batch(5, 6))
    with torch.inference_mode():
        model(batch(5, 6))
    model(batch(5, 6)).square().mean().backward()
    assert all(owned.updated for owned in optimizer.owned.values())
