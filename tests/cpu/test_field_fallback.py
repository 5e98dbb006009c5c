"""Public faults of waiting on weights that something reads without calling their module, stepped from ``.grad``.

Those beside it are fused: each window has both kinds.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mlp, snapshot


def run(model: nn.Sequential, x):
    """``model(x)``, whose second and fourth linear are read without their modules."""
    for index, module in enumerate(model):
        bypassed = isinstance(module, nn.Linear) and index % 4 == 2
        x = F.linear(x, module.weight, module.bias) if bypassed else module(x)
    return x


def loss(x):
    return lambda model: run(model, x).square().sum()


@backends
def test_one_coefficient_for_both_kinds(backend):  # field log row 2
    """The last layer, stepped from .grad, has in its first moment what depends on the fused first one."""
    pair = Pair(mlp(64, 64, 64, 64, 64), backend=backend, clip=0.1)
    for step in range(3):
        pair.train(loss(batch(8, 64, seed=step) * 10))
        assert pair.twin_norm > 1
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    how = {row.name: row.how for row in pair.optimizer.coverage}
    assert how["6.weight"] == "read without calling its module: stepped from .grad"
    assert how["4.weight"] == "fused"
    pair.expect_equal()


@pytest.mark.parametrize("call", [nn.Module.__call__, run], ids=["fused", "both"])
def test_sixty_four_micro_batches_of_one_to_512_tokens(call):  # field log row 12
    """Four layers of 256; equal to one batch, and no more is held at the end than in the middle."""
    pair = Pair(mlp(256, 256, 256, 256, 256), lr=1e-4, accumulation_steps=None)
    lengths = torch.randint(1, 513, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = batch(sum(lengths), 256)
    held = []
    for x in rows.split(lengths):
        (call(pair.model, x).square().sum() / len(rows)).backward()
        held.append(sum(owned.factors.nbytes() for owned in pair.optimizer.owned.values()))
    (call(pair.twin, rows).square().sum() / len(rows)).backward()
    pair.close()
    pair.expect_equal()
    fused = [row for row in pair.optimizer.coverage if row.fused]
    assert [row.name for row in fused] == [f"{index}.weight" for index in range(0, 8, 2 if call is not run else 4)]
    # The gradient pool of the same weights in torch.
    assert max(held) == sum(4 * math.prod(row.shape) for row in fused)
    assert all(row.waits_as == "accumulator" for row in fused)


@backends
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_discards_both_kinds(backend, set_to_none):  # field log row 26
    """Before, inside and after a window; of a model alone it is refused inside, where it would drop the half of it."""
    pair = Pair(mlp(6, 8, 8, 4), backend=backend, accumulation_steps=3)
    for model, optimizer in pair.sides():
        model.zero_grad(set_to_none=set_to_none)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(batch(5, 6))(model).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
    for seed in range(3):
        pair.backward(loss(batch(5, 6, seed=seed)))
    for model, optimizer in pair.sides():
        optimizer.step()
        model.zero_grad(set_to_none=set_to_none)
    pair.expect_equal()
    pair.backward(loss(batch(5, 6)))
    before = snapshot(pair.model, pair.optimizer)
    with pytest.raises(RuntimeError, match=r"0\.weight: a module's zero_grad\(\)"):
        pair.model.zero_grad(set_to_none=set_to_none)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))


@backends
def test_a_generators_loss_leaves_a_paused_discriminator_alone(backend):  # field log row 39
    g, d = (Pair(mlp(4, 6, 6, 6), backend=backend), Pair(mlp(6, 8, 1), backend=backend))
    noise = batch(5, 4)
    before = snapshot(d.model, d.optimizer)
    with d.optimizer.paused():
        run(d.model, run(g.model, noise)).sum().backward()
    run(d.twin, run(g.twin, noise)).sum().backward()
    expect_bit_equal(before, snapshot(d.model, d.optimizer))
    assert all(p.grad is None for p in d.model.parameters())
    d.oracle.zero_grad()
    g.close()
    d.train(loss(batch(5, 6)))
    g.expect_equal()
    d.expect_equal()


@backends
def test_norms_by_name_with_a_frozen_layer(backend):  # field log row 43
    model = mlp(6, 8, 8, 4)
    model[2].requires_grad_(False)
    pair = Pair(model, backend=backend)
    pair.backward(loss(batch(5, 6)))
    wanted = {name: p.grad.double().norm().item() for name, p in pair.twin.named_parameters() if p.grad is not None}
    pair.close()
    found = {name: norm.item() for name, norm in pair.optimizer.gradient_norms.items()}
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_gradient_penalty_of_weights_without_their_modules_is_right():  # field log row 74
    """``create_graph`` meets no function that steps a weight, and the penalty's gradient is an ordinary one."""
    pair = Pair(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)))
    x = batch(5, 6).requires_grad_()

    def penalty(model):
        y = F.linear(torch.tanh(F.linear(x, model[0].weight, model[0].bias)), model[1].weight, model[1].bias)
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return (slope.norm() - 1) ** 2

    before = snapshot(pair.model, pair.optimizer)
    pair.backward(penalty)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.close()
    pair.expect_equal()


@backends
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_broken_backward_is_rolled_back(backend, error):  # field log row 139
    """Broken off when the bypassed last layer has its .grad and the fused one before it its factors."""
    pair = Pair(mlp(6, 8, 8, 8, 4), backend=backend, skip="atomic")
    pair.train(loss(batch(5, 6)))
    before = copy.deepcopy(snapshot(pair.model, pair.optimizer))

    def broken(grad):
        raise error("on purpose")

    hidden = run(pair.model[:4], batch(5, 6))
    hidden.register_hook(broken)
    with pytest.raises(error, match="on purpose"):
        # The sixth and the fourth module here are the model's last linear and the one before it.
        F.linear(pair.model[5](pair.model[4](hidden)), pair.model[6].weight, pair.model[6].bias).sum().backward()
    assert pair.model[6].weight.grad is not None
    assert pair.optimizer.owned[pair.model[4].weight].factors
    assert pair.optimizer.rollback()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert all(p.grad is None for p in pair.model.parameters())
    pair.train(loss(batch(5, 6, seed=1)))
    pair.expect_equal()


@backends
def test_a_nan_in_a_bypassed_layer_skips_the_fused_ones(backend):  # field log rows 10, 147
    model = mlp(6, 8, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic", backend=backend)
    loss(batch(5, 6))(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    (loss(batch(5, 6))(model) + model[2].weight[0, 0] * math.nan).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None and p is not model[2].weight)
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    assert optimizer.skip_counts == {name: int(name == "2.weight") for name, _ in model.named_parameters()}
