"""One update per weight and step, from the sum of all its uses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mean_square, mlp


class Tied(nn.Module):
    """An embedding, a block and a head that is the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.block(self.embedding(ids))))


@backends
def test_a_plain_stack_trains_as_under_torch(backend):
    pair = Pair(mlp(6, 9, 5, 3), backend=backend)
    x = batch(7, 6)
    for _ in range(2):
        pair.train(mean_square(x))
    pair.expect_equal()
    assert all(layer.weight.grad is None for layer in pair.model if isinstance(layer, nn.Linear))


@backends
def test_a_module_that_is_called_twice_in_a_row(backend):
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        pair.train(lambda model: model(torch.tanh(model(x))).square().mean())
    pair.expect_equal()


@backends
def test_siamese_calls(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    a, b = batch(5, 6, seed=1), batch(3, 6, seed=2)
    for _ in range(2):
        pair.train(lambda model: (model(a).mean(0) - model(b).mean(0)).square().sum())
    pair.expect_equal()


@backends
def test_two_graphs_before_one_step(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    a, b = batch(5, 6, seed=1), batch(3, 6, seed=2)
    for _ in range(2):
        for model, optimizer in pair.sides():
            first, second = model(a).square().mean(), model(b).square().mean()
            first.backward()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.expect_equal()


@backends
def test_an_output_that_is_alive_but_never_differentiated(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    a, b = batch(5, 6, seed=1), batch(3, 6, seed=2)
    kept = []

    def loss(model):
        kept.append(model(b))
        return model(a).square().mean()

    pair.train(loss, loss, loss)
    pair.expect_equal()


@backends
def test_an_embedding_tied_to_the_head(backend):
    pair = Pair(Tied(), backend=backend)
    ids = torch.tensor([[1, 4, 4], [0, 9, 2]])
    for _ in range(2):
        pair.train(lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
    pair.expect_equal()
    assert pair.optimizer.state[pair.model.head.weight]["step"] == 2


@backends
@pytest.mark.parametrize("module_first", [True, False])
def test_a_weight_that_a_function_reads_beside_its_module(backend, module_first):
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)

    def loss(model):
        layer = model[0]
        if module_first:
            return F.linear(torch.tanh(layer(x)), layer.weight).square().mean()
        return layer(torch.tanh(F.linear(x, layer.weight))).square().mean()

    pair.train(loss, loss, loss)
    pair.expect_equal()


@backends
def test_a_weight_penalty(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)

    def loss(model):
        return model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())

    pair.train(loss, loss, loss)
    pair.expect_equal()


@backends
def test_a_weight_that_only_a_function_reads(backend):
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        pair.train(lambda model: F.linear(x, model[0].weight).square().mean())
    pair.expect_equal()
    row = next(row for row in pair.optimizer.coverage if row.name == "0.weight")
    assert not row.fused
    assert ".grad" in row.how


@backends
@pytest.mark.parametrize("module_first", [True, False])
def test_a_module_and_a_function_in_two_graphs(backend, module_first):
    """The function's backward needs the weight itself, which must not have changed."""
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        for model, optimizer in pair.sides():
            read = F.linear(x.clone().requires_grad_(), model[0].weight).square().mean()
            called = model(x).square().mean()
            for loss in (called, read) if module_first else (read, called):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.expect_equal()


@backends
def test_a_function_s_graph_that_is_alive_but_never_differentiated(backend):
    """The weight waits for as long as it might be, and no longer."""
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)
    kept = {id(model): model[0].weight.norm() for model, _ in pair.sides()}
    pair.train(mean_square(x))
    before = pair.model[0].weight.detach().clone()
    mean_square(x)(pair.model).backward()
    assert torch.equal(pair.model[0].weight, before)
    pair.optimizer.zero_grad()
    kept.clear()
    mean_square(x)(pair.model).backward()
    assert not torch.equal(pair.model[0].weight, before)
    pair.optimizer.step()
    pair.optimizer.zero_grad()


@backends
def test_a_function_that_reads_what_backward_has_updated_is_refused(backend):
    model = mlp(6, 6)
    optimizer = forge.attach(model, lr=1e-3, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    model[0].weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight.*without its module"):
        optimizer.step()


@backends
def test_zero_grad_between_forward_and_backward(backend):
    """The order of torch's own tutorials: the graph outlives zero_grad()."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        for model, optimizer in pair.sides():
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    pair.expect_equal()


@backends
def test_a_graph_that_is_older_than_a_step_that_left_its_weights_alone(backend):
    """Its weights are unchanged, so its backward is valid, and must train."""
    pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)]), backend=backend)
    x = batch(5, 6)
    for model, optimizer in pair.sides():
        early = model[0](x).square().mean()
        model[1](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        early.backward()
        optimizer.step()
        optimizer.zero_grad()
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 1


@backends
def test_a_retained_graph_is_differentiated_again_after_its_window_was_discarded(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    x = batch(5, 6)
    for model, optimizer in pair.sides():
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pair.expect_equal()


@backends
def test_a_retained_graph_with_several_uses_is_updated_once_after_a_discard(backend):
    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6)
    for model, optimizer in pair.sides():
        # A second reader makes the first backward wait; the second backward has no such reader.
        y = model(torch.tanh(model(x))).square().mean()
        (y + model[0].weight.sum()).backward(retain_graph=True)
        optimizer.zero_grad()
        y.backward()
        optimizer.step()
    pair.expect_equal()
