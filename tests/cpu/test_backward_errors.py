"""What cannot be made exact is refused with an error that names the weight, before any weight has changed."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import forge_megatron as forge
from tests.cpu.training import Fails, Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def failing(model, x):
    """Backward fails between the last linear and the first."""
    return model[2](Fails.apply(model[1](model[0](x)))).square().mean()


@backends
def test_a_second_backward_before_step(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6)
    model(x).square().mean().backward()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"weight: a second backward before step\(\).*accumulation_steps"):
        model(x).square().mean().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_a_second_backward_over_a_retained_graph(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    loss = model(batch(5, 6)).square().mean()
    loss.backward(retain_graph=True)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"weight: a second backward before step\(\)"):
        loss.backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_a_second_backward_that_reaches_an_updated_weight_last(backend):
    """model[1] would be updated before the engine gets to model[0]; the pre-flight sees both."""
    model = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 4)])
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6)
    model[0](x).square().mean().backward()
    loss = model[1](torch.tanh(model[0](x))).square().mean()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"^0\.weight: a second backward"):
        loss.backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_zero_grad_cannot_hide_an_update(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) after backward: 0\.weight"):
        optimizer.zero_grad()


@backends
def test_one_more_micro_batch_than_asked_for(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, accumulation_steps=2)
    before = snapshot(model, optimizer)
    for seed in range(2):
        model(batch(5, 6, seed=seed)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"backward number 3 .* accumulation_steps=2"):
        model(batch(5, 6)).square().mean().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_a_step_without_zero_grad(backend):
    """torch would add to the old .grad; the owned weights' old gradients no longer exist."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6)
    model(x).square().mean().backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was not called"):
        model(x).square().mean().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_a_backward_that_fails_after_an_update(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    x = batch(5, 6)
    with pytest.raises(ArithmeticError):
        failing(model, x).backward()
    message = r"the last backward failed after it had updated 1 of 2 weights \(the first is 2\.weight\)"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        model(x).square().mean().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.state_dict()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@backends
def test_a_backward_that_fails_while_everything_waits(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    x = batch(5, 6)
    before = snapshot(pair.model, pair.optimizer)
    with pytest.raises(ArithmeticError):
        failing(pair.model, x).backward()
    with pytest.raises(RuntimeError, match=r"the last backward failed.* call zero_grad\(\)"):
        pair.optimizer.step()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.optimizer.zero_grad()
    pair.train(mean_square(x))
    pair.expect_equal()


@backends
def test_a_micro_batch_that_fails_is_not_half_of_the_window(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, accumulation_steps=3)
    x = batch(5, 6)
    model(x).square().mean().backward()
    with pytest.raises(ArithmeticError):
        failing(model, x).backward()
    with pytest.raises(RuntimeError, match="the last backward failed"):
        model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="the last backward failed"):
        optimizer.step()


@backends
def test_an_exception_in_a_hook_is_a_failed_backward(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)

    def hook(grad):
        raise ArithmeticError("on purpose")

    hidden = model[1](model[0](batch(5, 6)))
    hidden.register_hook(hook)
    with pytest.raises(ArithmeticError):
        model[2](hidden).square().mean().backward()
    with pytest.raises(RuntimeError, match="the last backward failed after"):
        optimizer.step()


def test_a_failure_before_the_first_linear_changes_nothing():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    x = batch(5, 6)
    with pytest.raises(ArithmeticError):
        Fails.apply(model(x)).square().mean().backward()
    model(x).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1


@backends
@pytest.mark.parametrize("options", [{}, {"clip": 0.05, "accumulation_steps": 2}], ids=["immediate", "waiting"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook", "multi"])
def test_a_gradient_hook_on_an_owned_weight_is_honoured(backend, register, options):
    """While it is registered the gradient is formed, seen and, by ``register_hook``, changed; then fused again."""
    pair = Pair(mlp(6, 8, 4), backend=backend, **options)
    weight, x = pair.model[0].weight, batch(5, 6)
    micro_batches = options.get("accumulation_steps", 1)

    def hook(model, seen):
        weight = model[0].weight
        if register == "register_hook":
            return weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
        if register == "multi":
            weights = [weight, model[2].weight]
            return torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: seen.append(grads[0].clone()))
        return weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    seen = [], []
    for window in range(3):
        for micro in range(micro_batches):
            # In the second window; of an accumulated one in its second micro-batch, where the hook does not see sums.
            sees_sums = register == "register_post_accumulate_grad_hook"
            if window == 1 and micro == (0 if sees_sums else micro_batches - 1):
                handles = [hook(model, saw) for (model, _), saw in zip(pair.sides(), seen, strict=True)]
                how = {row.name: row.how for row in pair.optimizer.coverage}
                assert how["0.weight"] == "a gradient hook is registered: stepped from .grad"
            pair.backward(mean_square(x * (1 + micro)))
        assert (weight.grad is not None) == (window == 1)
        pair.close()
        if window == 1:
            for handle in handles:
                handle.remove()
    assert len(seen[0]) == (micro_batches if sees_sums else 1)
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-8)
    pair.expect_equal()


@backends
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook", "multi"])
def test_a_gradient_hook_between_forward_and_backward_is_refused(backend, register):
    """At its registration; the backward then runs as if nobody had asked."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    weight = pair.model[0].weight
    loss = mean_square(batch(5, 6))(pair.model)
    multi = partial(torch.autograd.graph.register_multi_grad_hook, [weight])
    with pytest.raises(RuntimeError, match=r"^0\.weight: a gradient hook between forward and backward"):
        (multi if register == "multi" else getattr(weight, register))(lambda _: None)
    loss.backward()
    mean_square(batch(5, 6))(pair.twin).backward()
    # From here on one would see the next gradient.
    weight.register_hook(lambda grad: None).remove()
    pair.close()
    pair.expect_equal()
    assert weight.grad is None


def test_a_detached_optimizer_asks_nobody_about_hooks():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    optimizer.detach()
    loss, seen = mean_square(batch(5, 6))(model), []
    model[0].weight.register_hook(seen.append)
    loss.backward()
    assert len(seen) == 1


def test_a_gradient_hook_on_an_owned_embedding_and_a_head_with_its_loss_is_honoured():
    torch.manual_seed(0)
    model, twin = (nn.ModuleList([nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)]) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    pair = Pair(model, twin=twin)
    ids = torch.tensor([1, 4, 4, 9])
    seen = []
    for weight in (model[0].weight, model[1].weight):
        weight.register_hook(lambda grad: seen.append(grad.shape))
    forge.vocab.linear_cross_entropy(model[0](ids), model[1], ids.roll(1)).backward()
    nn.functional.cross_entropy(twin[1](twin[0](ids)), ids.roll(1)).backward()
    pair.close()
    assert seen == [(11, 6), (11, 6)]
    pair.expect_equal()


def test_a_gradient_hook_from_before_attach_fires():
    pair_model = mlp(6, 8, 4)
    seen = []
    pair_model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    optimizer = forge.attach(pair_model, lr=1e-2)
    assert "hook" in next(row for row in optimizer.coverage if row.name == "0.weight").how
    pair_model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    assert len(seen) == 1
    assert optimizer.state[pair_model[0].weight]["step"] == 1


@backends
def test_module_hooks_work(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    seen = {}
    for model, _ in pair.sides():
        grads = seen.setdefault(model, [])
        for layer in (model[0], model[2]):
            layer.register_forward_hook(lambda module, args, out: out * 2)
            layer.register_full_backward_hook(lambda module, gin, gout, grads=grads: grads.append(gout[0]))
    pair.train(mean_square(x))
    pair.expect_equal()
    for ours, theirs in zip(seen[pair.model], seen[pair.twin], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@backends
def test_create_graph(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    x = batch(5, 6).requires_grad_()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model(x).sum().backward(create_graph=True)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    expect_bit_equal(before, snapshot(model, optimizer))


def test_step_inside_backward():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    hidden = model[1](model[0](batch(5, 6)))
    hidden.register_hook(lambda grad: optimizer.step())
    with pytest.raises(RuntimeError, match="inside backward"):
        model[2](hidden).square().mean().backward()


def test_a_weight_that_was_moved_or_cast_after_attach():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"weight: was .*float32.* at attach and is .*bfloat16"):
        model(batch(5, 6).bfloat16()).float().square().mean().backward()
    assert optimizer.state[model[0].weight]["step"] == 0


@pytest.mark.parametrize("how", ["assign", "parameter", "prune", "parametrize", "weight_norm"])
def test_a_weight_that_was_replaced_after_attach(how):
    """torch would train what nobody looks at any more, without a word."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    if how == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif how == "parameter":
        model[0].weight = nn.Parameter(torch.zeros(8, 6))
    elif how == "prune":
        prune.l1_unstructured(model[0], "weight", amount=0.5)
    elif how == "parametrize":
        nn.utils.parametrizations.weight_norm(model[0])
    else:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model[0])
    with pytest.raises(RuntimeError, match=r"^0\.weight: .* then attach"):
        model(batch(5, 6))
    assert optimizer.state
