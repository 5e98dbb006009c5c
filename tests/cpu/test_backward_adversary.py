"""Ways to hold it wrong, and unusual but exact programs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
def test_the_halves_of_a_model_in_two_backwards_of_one_window(backend):
    """No weight is in both, so each is updated once from its whole gradient."""
    pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)]), backend=backend)
    x = batch(5, 6)
    for _ in range(3):
        pair.backward(lambda model: model[0](x).square().mean())
        pair.backward(lambda model: model[1](x).square().mean())
        pair.close()
    pair.expect_equal()


@backends
def test_the_halves_of_a_clipped_model_in_two_backwards(backend):
    pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)]), backend=backend, clip=0.1)
    x = batch(5, 6)
    for _ in range(3):
        pair.backward(lambda model: model[0](x).square().mean())
        pair.backward(lambda model: model[1](x).square().mean())
        pair.close()
    pair.expect_equal()


@backends
def test_a_second_step_without_a_backward_is_refused(backend):
    """torch would apply every gradient again; an owned weight's no longer exists."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was not called after the last step"):
        optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
@pytest.mark.parametrize("part", ["whole", "rows", "transposed"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=["immediate", "clipped"])
def test_a_weight_that_is_the_input_of_another_linear(backend, part, options):
    """When both wait, stepping the one must not change the other's factor."""
    torch.manual_seed(0)
    pair = Pair(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]), backend=backend, **options)
    x = batch(5, 6)
    view = {"whole": lambda w: w, "rows": lambda w: w[1:5], "transposed": lambda w: w.t()}[part]

    def loss(model):
        return model[0](x).square().mean() + model[1](view(model[0].weight)).square().mean()

    pair.train(loss, loss, loss)
    pair.expect_equal()


@backends
def test_several_roots(backend):
    pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), backend=backend)
    x, grads = batch(5, 6), [batch(5, 4, seed=1), batch(5, 4, seed=2)]
    for _ in range(2):
        for model, _ in pair.sides():
            torch.autograd.backward([model[0](x), model[1](x)], grads)
        pair.close()
    pair.expect_equal()


@backends
def test_the_root_is_the_linear_itself_twice(backend):
    """Both calls of one layer are roots, and one is the input of the other."""
    pair = Pair(nn.Linear(4, 4), backend=backend)
    x = batch(5, 4)
    for _ in range(2):
        for model, _ in pair.sides():
            first = model(x)
            torch.autograd.backward([first, model(first)], [torch.ones(5, 4), batch(5, 4, seed=3)])
        pair.close()
    pair.expect_equal()


@backends
def test_outputs_that_are_changed_in_place(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)

    def loss(model):
        h = model[0](x)
        h += 1
        return model[2](h.mul_(2).relu_()).square().mean()

    pair.train(loss, loss)
    pair.expect_equal()


@backends
def test_an_input_that_is_changed_in_place_after_the_forward_is_torchs_error(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, waiting=True)
    hidden = torch.tanh(model[0](batch(5, 6))) * 1
    loss = model[2](hidden).square().mean()
    hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="the last backward failed"):
        optimizer.step()


def test_anomaly_detection():
    pair = Pair(mlp(6, 8, 4))
    with torch.autograd.detect_anomaly(check_nan=True):
        pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


@backends
def test_a_gradient_that_is_already_there_is_added(backend):
    """Such as a regulariser that the user writes to .grad before backward."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    for _ in range(2):
        for model, _ in pair.sides():
            for p in model.parameters():
                p.grad = 0.1 * p.detach()
        pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


@backends
def test_a_gradient_that_the_user_adds_after_backward(backend):
    """Exact where the weight waits; refused where it has been updated."""
    pair = Pair(mlp(6, 8, 4, bias=False), backend=backend, waiting=True)
    pair.backward(mean_square(batch(5, 6)))
    for model, _ in pair.sides():
        for p in model.parameters():
            p.grad = 0.1 * p.detach() if p.grad is None else p.grad + 0.1 * p.detach()
    pair.close()
    pair.expect_equal()
    model = mlp(6, 8, 4, bias=False)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    model[0].weight.grad = torch.ones(8, 6)
    with pytest.raises(RuntimeError, match=r"0\.weight: updated in one backward and read without its module"):
        optimizer.step()


@backends
def test_selective_checkpointing(backend):
    """The matrix products are saved, the rest is recomputed."""
    pair = Pair(mlp(6, 8, 8, 4), backend=backend)
    x = batch(5, 6).requires_grad_()
    save = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def contexts():
        return checkpoint.create_selective_checkpoint_contexts(save)

    for _ in range(2):
        pair.train(
            lambda model: checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()
        )
    pair.expect_equal()


def test_a_checkpoint_without_early_stop():
    pair = Pair(mlp(6, 6))
    x = batch(5, 6).requires_grad_()
    with checkpoint.set_checkpoint_early_stop(False):
        for _ in range(2):
            pair.train(
                lambda model: model(torch.tanh(checkpoint.checkpoint(model, x, use_reentrant=False))).square().mean()
            )
    pair.expect_equal()


@backends
def test_a_backward_inside_a_hook_of_another(backend):
    """A second graph task inside the first, over other weights."""
    pair = Pair(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]), backend=backend)
    x = batch(5, 6)
    for _ in range(2):
        for model, _ in pair.sides():
            side = model[1](x).square().mean()
            h = model[0](x)
            h.register_hook(lambda grad, side=side: side.backward())
            h.square().mean().backward()
        pair.close()
    pair.expect_equal()


@backends
def test_an_implicit_layer_that_iterates_in_its_hook(backend):
    """A deep equilibrium model: a fixed point without a graph, one call with, and a solve inside backward."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    with torch.no_grad():
        layer.weight.mul_(0.3)
    pair = Pair(layer, backend=backend)
    x = batch(5, 6)

    def loss(model):
        with torch.no_grad():
            z = torch.zeros(5, 6)
            for _ in range(20):
                z = torch.tanh(model(z) + x)
        z = torch.tanh(model(z) + x)
        start = z.clone().detach().requires_grad_()
        again = torch.tanh(model(start) + x)

        def solve(grad):
            g = grad
            for _ in range(20):
                g = torch.autograd.grad(again, start, g, retain_graph=True)[0] + grad
            return g

        z.register_hook(solve)
        return z.square().mean()

    pair.train(loss, loss)
    pair.expect_equal()


@backends
def test_a_recurrence_of_fifty_uses(backend):
    pair = Pair(nn.Linear(8, 8), backend=backend)
    x = batch(2, 8)

    def loss(model):
        h = x
        for _ in range(50):
            h = torch.tanh(model(h) + x)
        return h.square().mean()

    pair.train(loss, loss)
    pair.expect_equal()


@backends
def test_a_function_of_the_users_own_around_a_layer(backend):
    """Its forward has no graph and its backward builds one: a checkpoint by hand."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            ctx.save_for_backward(x)
            return module(x)

        @staticmethod
        def backward(ctx, dy):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(x)
            torch.autograd.backward(y, dy)
            return x.grad, None

    pair = Pair(mlp(6, 6), backend=backend)
    x = batch(5, 6).requires_grad_()

    def loss(model):
        return model(torch.tanh(Recompute.apply(torch.tanh(Recompute.apply(x, model)), model))).square().mean()

    pair.train(loss, loss)
    pair.expect_equal()


@backends
@pytest.mark.parametrize("write", ["vector_to_parameters", "data", "load_state_dict"])
def test_weights_written_past_autograd_before_the_first_step(backend, write):
    pair = Pair(mlp(6, 8, 4).bfloat16(), twin=mlp(6, 8, 4), recipe="fp32-master", backend=backend)
    values = [torch.full_like(p, 0.25) for p in pair.model.parameters()]
    if write == "vector_to_parameters":
        nn.utils.vector_to_parameters(torch.cat([v.flatten() for v in values]), pair.model.parameters())
    elif write == "data":
        for p, v in zip(pair.model.parameters(), values, strict=True):
            p.data.copy_(v)
    else:
        pair.model.load_state_dict(dict(zip(pair.model.state_dict(), values, strict=True)))
    pair.model(batch(5, 6).bfloat16()).float().square().mean().backward()
    pair.optimizer.step()
    for p in pair.model.parameters():
        assert (pair.optimizer.state[p]["master"] - 0.25).abs().max() < 2e-3


@backends
def test_new_memory_for_the_weights_between_steps(backend):
    """vector_to_parameters gives every parameter new memory; kernels must follow it."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    pair.train(mean_square(x))
    for model, _ in pair.sides():
        vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
        nn.utils.vector_to_parameters(vector.clone(), model.parameters())
    pair.train(mean_square(x), mean_square(x))
    pair.expect_equal()


@backends
def test_functional_call_with_other_tensors(backend):
    """Without gradients it evaluates them; with gradients it is refused, for nobody would step them."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        assert not torch.func.functional_call(model, zeros, batch(5, 6)).any()
    for tensor in zeros.values():
        tensor.requires_grad_()
    with pytest.raises(RuntimeError, match=r"^0\.weight: the module's weight is another tensor"):
        torch.func.functional_call(model, zeros, batch(5, 6))
    assert optimizer.state[model[0].weight]["step"] == 0


@backends
def test_dropout_and_losses_of_every_reduction(backend):
    pair = Pair(nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 5)), backend=backend)
    x, target = batch(7, 6), torch.tensor([0, 1, 2, 3, 4, 0, -100])

    def loss(model, reduction):
        torch.manual_seed(5)
        value = F.cross_entropy(model(x), target, reduction=reduction, label_smoothing=0.1)
        return value.sum() / 6 if reduction == "none" else value

    for reduction in ("mean", "sum", "none"):
        pair.train(lambda model, reduction=reduction: loss(model, reduction))
    pair.expect_equal()
