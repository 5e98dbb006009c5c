"""A backward that passes through an attached model on its way to another; and models that are detached."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def gan(backend, **options):
    """Generator and discriminator, attached, and their twins."""
    return Pair(mlp(4, 8, 6, seed=1), backend=backend, **options), Pair(
        mlp(6, 8, 1, seed=2), backend=backend, **options
    )


def discriminate(d, g, noise, real):
    fake = d(g(noise).detach())
    true = d(real)
    return F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)) + F.binary_cross_entropy_with_logits(
        true, torch.ones_like(true)
    )


def generate(d, g, noise):
    fake = d(g(noise))
    return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))


@backends
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=["immediate", "clipped"])
def test_a_generator_trains_through_a_paused_discriminator(backend, options):  # field log row 39
    g, d = gan(backend, **options)
    real = batch(5, 6)
    for step in range(3):
        noise = batch(5, 4, seed=step)
        before = snapshot(d.model, d.optimizer)
        with d.optimizer.paused():
            generate(d.model, g.model, noise).backward()
        expect_bit_equal(before, snapshot(d.model, d.optimizer))
        assert all(p.grad is None for p in d.model.parameters())
        generate(d.twin, g.twin, noise).backward()
        d.oracle.zero_grad()
        g.close()
        for (model, optimizer), (generator, _) in zip(d.sides(), g.sides(), strict=True):
            optimizer.zero_grad()
            discriminate(model, generator, noise, real).backward()
        d.close()
    g.expect_equal()
    d.expect_equal()


@backends
def test_only_the_backward_is_paused(backend):
    g, d = gan(backend)
    noise = batch(5, 4)
    before = snapshot(d.model, d.optimizer)
    loss = generate(d.model, g.model, noise)
    with d.optimizer.paused():
        loss.backward()
    generate(d.twin, g.twin, noise).backward()
    g.close()
    g.expect_equal()
    expect_bit_equal(before, snapshot(d.model, d.optimizer))
    assert all(p.grad is None for p in d.model.parameters())


@backends
def test_only_the_forward_is_paused(backend):
    g, d = gan(backend)
    noise = batch(5, 4)
    before = snapshot(d.model, d.optimizer)
    with d.optimizer.paused():
        loss = generate(d.model, g.model, noise)
    loss.backward()
    generate(d.twin, g.twin, noise).backward()
    g.close()
    g.expect_equal()
    expect_bit_equal(before, snapshot(d.model, d.optimizer))
    assert all(p.grad is None for p in d.model.parameters())


@backends
def test_paused_in_the_middle_of_an_accumulation_window(backend):
    """The pending gradients, kept factors and .grad alike, are those of the window alone."""
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=2)
    pair.backward(lambda model: model(batch(5, 6)).square().mean())
    x = batch(5, 6, seed=9).requires_grad_()
    with pair.optimizer.paused():
        pair.model(x).sum().backward()
    assert x.grad is not None
    pair.backward(lambda model: model(batch(5, 6, seed=1)).square().mean())
    pair.close()
    pair.expect_equal()


def test_paused_restores_what_was_frozen_and_what_was_not():
    model = mlp(6, 8, 4)
    model[0].weight.requires_grad_(False)
    optimizer = forge.attach(model, lr=1e-2)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ArithmeticError), optimizer.paused(), optimizer.paused():
        raise ArithmeticError
    assert [p.requires_grad for p in model.parameters()] == before


@backends
def test_a_gradient_penalty_through_a_paused_discriminator(backend):
    """Its weights are constants there, so double backward is exact."""
    g, d = gan(backend)
    noise = batch(5, 4)
    penalties = []
    for model, generator, pause in ((d.model, g.model, True), (d.twin, g.twin, False)):
        for p in model.parameters() if not pause else ():
            p.requires_grad_(False)
        context = d.optimizer.paused() if pause else torch.enable_grad()
        with context:
            x = generator(noise)
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            penalty.backward()
        penalties.append(penalty.detach())
    torch.testing.assert_close(*penalties, rtol=0, atol=1e-6)
    g.close()
    g.expect_equal()


@backends
def test_a_detached_model_is_an_ordinary_model(backend):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, backend=backend)
    x = batch(5, 6)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.detach()
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]
    expect_bit_equal(weights, [p.detach() for p in model.parameters()])
    model(x).square().mean().backward()
    expect_bit_equal(weights, [p.detach() for p in model.parameters()])
    assert all(p.grad is not None for p in model.parameters())
    gradient = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)[0]
    assert gradient.requires_grad


@backends
def test_training_goes_on_after_detach(backend):
    """The optimizer steps every weight from .grad then, with the states it has."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    pair.train(mean_square(x))
    pair.optimizer.detach()
    pair.train(mean_square(x), mean_square(x))
    pair.expect_equal()
    assert not any(row.fused for row in pair.optimizer.coverage)
    nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)


def test_detach_and_attach_again():
    pair = Pair(mlp(6, 8, 4))
    x = batch(5, 6)
    pair.train(mean_square(x))
    saved = pair.optimizer.state_dict()
    pair.optimizer.detach()
    pair.optimizer = forge.attach(pair.model, lr=1e-3)
    pair.optimizer.load_state_dict(saved)
    pair.train(mean_square(x))
    pair.expect_equal()
    assert all(row.fused for row in pair.optimizer.coverage if row.name.endswith("weight"))


def test_detach_with_a_pending_backward_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    model(batch(5, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: a backward is pending"):
        optimizer.detach()


def test_a_graph_from_before_detach_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    loss = model(batch(5, 6)).square().mean()
    optimizer.detach()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"weight: its optimizer was detached or deleted"):
        loss.backward()
    expect_bit_equal(before, [p.detach() for p in model.parameters()])


def test_a_graph_whose_optimizer_was_deleted_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    loss = model(batch(5, 6)).square().mean()
    del optimizer
    with pytest.raises(RuntimeError, match=r"weight: its optimizer was detached or deleted"):
        loss.backward()


def test_a_model_whose_optimizer_was_deleted_is_an_ordinary_model():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    del optimizer
    model(batch(5, 6)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_second_attach_of_the_same_weights_is_refused():
    model = mlp(6, 8, 4)
    first = forge.attach(model, lr=1e-2)
    with pytest.raises(ValueError, match=r"^0\.weight: another ForgeOptimizer already steps this weight"):
        forge.attach(model, lr=1e-2)
    # The refusal left the first as it was.
    model(batch(5, 6)).square().mean().backward()
    first.step()
    assert first.state[model[0].weight]["step"] == 1


@backends
def test_two_optimizers_over_the_halves_of_one_model(backend):
    pair = Pair(mlp(6, 8, 8, 4), backend=backend, params=None)
    model = mlp(6, 8, 8, 4)
    halves = [
        forge.attach(model, lr=1e-3, params=model[0].parameters(), backend=backend),
        forge.attach(model, lr=1e-3, params=[*model[2].parameters(), *model[4].parameters()], backend=backend),
    ]
    x = batch(5, 6)
    for _ in range(3):
        pair.train(mean_square(x))
        model(x).square().mean().backward()
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@backends
def test_one_optimizer_refuses_before_the_other_updates(backend):
    """The pre-flight asks every optimizer first."""
    model = mlp(6, 8, 4)
    first = forge.attach(model, lr=1e-2, params=model[0].parameters(), backend=backend)
    second = forge.attach(model, lr=1e-2, params=model[2].parameters(), backend=backend)
    x = batch(5, 6)
    model[0](x).square().mean().backward()
    before = snapshot(model, second)
    with pytest.raises(RuntimeError, match=r"^0\.weight: a second backward"):
        model(x).square().mean().backward()
    expect_bit_equal(before, snapshot(model, second))
    assert first.state[model[0].weight]["step"] == 1


def test_a_model_whose_optimizer_was_deleted_is_attached_again():
    pair = Pair(mlp(6, 8, 4))
    x = batch(5, 6)
    pair.optimizer = None
    pair.optimizer = forge.attach(pair.model, lr=1e-3)
    assert all(row.fused for row in pair.optimizer.coverage if row.name.endswith("weight"))
    pair.train(mean_square(x))
    pair.expect_equal()


def generator_first(optimizer_of):
    """torch's order: the generator's backward adds to the gradients that the discriminator's last step left."""
    g, d = mlp(6, 4), mlp(4, 8, 1, seed=1)
    for_g, for_d = optimizer_of(g), optimizer_of(d)
    for step in range(4):
        z, real = batch(5, 6, seed=step), batch(5, 4, seed=10 + step)
        for_g.zero_grad()
        (-d(g(z)).mean()).backward()
        for_g.step()
        for_d.zero_grad()
        (d(g(z).detach()).mean() - d(real).mean()).backward()
        for_d.step()
    return [p.detach().clone() for model in (g, d) for p in model.parameters()]


@pytest.mark.parametrize("options", [{"waiting": True}, {"accumulation_steps": None}, {"clip_grad_norm": 1e6}], ids=str)
def test_what_a_generator_adds_to_its_discriminator_is_zeroed_before_it_is_stepped(options):
    ours = generator_first(lambda model: forge.attach(model, lr=1e-2, weight_decay=0.0, **options))
    theirs = generator_first(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-7)


def test_a_gradient_that_nobody_zeroed_is_still_an_error_at_step():
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2, waiting=True)
    for _ in range(2):
        model(batch(5, 6)).square().mean().backward()
        if optimizer.state[model[0].bias]["step"] == 0:
            optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"0\.bias: zero_grad\(\) was not called after the last step"):
        optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
