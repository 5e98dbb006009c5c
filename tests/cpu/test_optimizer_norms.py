"""Norms of gradients that are never stored and of the updates they made, by name; clipping weight by weight."""

import math

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels
from tests.cpu.training import Pair, backends, batch, mean_square, mlp


def norms64(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}


def expect_norms(ours: dict, theirs: dict[str, float], rtol: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, norm in theirs.items():
        assert math.isclose(ours[name].item(), norm, rel_tol=rtol, abs_tol=1e-12), name


@backends
@pytest.mark.parametrize(
    "options", [{}, {"waiting": True}, {"clip": 0.01}, {"skip": "atomic"}, {"accumulation_steps": 3}]
)
def test_gradient_norms_by_name(backend, options):  # field log row 43
    """Before clipping, in the units of the loss; a frozen parameter has none."""
    model = mlp(6, 8, 8, 4)
    model[2].weight.requires_grad_(False)
    pair = Pair(model, backend=backend, **options)
    assert pair.optimizer.gradient_norms == {}
    for seed in range(2):
        for micro in range(options.get("accumulation_steps", 1)):
            pair.backward(mean_square(batch(5, 6, seed=10 * seed + micro)))
        theirs = norms64(pair.twin)
        pair.close()
        expect_norms(pair.optimizer.gradient_norms, theirs)
        total = math.sqrt(sum(norm**2 for norm in theirs.values()))
        assert math.isclose(pair.optimizer.grad_norm.item(), total, rel_tol=1e-5)


def test_gradient_norms_follow_the_late_scale():
    pair = Pair(mlp(6, 8, 4), waiting=True)
    pair.backward(mean_square(batch(5, 6)))
    pair.optimizer.step(gradient_multiplier=-0.25)
    expect_norms(pair.optimizer.gradient_norms, {name: norm / 4 for name, norm in norms64(pair.twin).items()})


@backends
@pytest.mark.parametrize("options", [{}, {"skip": "atomic"}], ids=["immediate", "atomic"])
def test_update_norms_by_name(backend, options):
    """Measured inside the context only, of weights stepped in backward, from factors and from .grad."""
    pair = Pair(mlp(6, 8, 4), backend=backend, lr=0.1, **options)
    assert pair.optimizer.update_norms == {}
    pair.train(mean_square(batch(5, 6)))
    before = [p.detach().clone() for p in pair.twin.parameters()]
    with pair.optimizer.measuring_updates():
        pair.train(mean_square(batch(5, 6, seed=1)))
        inside = pair.optimizer.update_norms
    moved = [(p - old).double().norm().item() for p, old in zip(pair.twin.parameters(), before, strict=True)]
    theirs = dict(zip(dict(pair.twin.named_parameters()), moved, strict=True))
    expect_norms(inside, theirs)
    pair.train(mean_square(batch(5, 6, seed=2)))
    expect_norms(pair.optimizer.update_norms, theirs)
    pair.expect_equal(atol=1e-5)


@pytest.mark.parametrize("rule", ["lamb", "muon", "adafactor"])
@pytest.mark.parametrize("waiting", [False, True])
def test_update_norms_of_rules_in_stages(rule, waiting):
    model = nn.Sequential(*mlp(16, 16, 16, bias=False))
    optimizer = forge.attach(model, rule, lr=0.1, waiting=waiting)
    before = [p.detach().double() for p in model.parameters()]
    with optimizer.measuring_updates():
        model(batch(5, 16)).square().mean().backward()
        optimizer.step()
    moved = [(p.double() - old).norm().item() for p, old in zip(model.parameters(), before, strict=True)]
    expect_norms(optimizer.update_norms, dict(zip(optimizer.names.values(), moved, strict=True)), rtol=1e-4)


def test_an_update_below_the_weights_own_rounding_has_a_norm():
    """bf16 weights with an fp32 master: the step is seen although the weight has not moved."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = forge.attach(model, lr=1e-5, weight_decay=0.0, recipe="fp32-master")
    with optimizer.measuring_updates():
        model(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert (model.weight == 1).all()
    # AdamW's first step is lr in every coordinate; fp32 at 1 has a spacing of 6e-8 below.
    assert math.isclose(optimizer.update_norms["weight"].item(), 1e-5 * 8, rel_tol=5e-3)


@backends
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_each_weight_is_clipped_by_its_own_norm(backend, accumulation_steps):
    limit = 0.08 * accumulation_steps
    pair = Pair(mlp(6, 8, 8, 4), backend=backend)
    pair.optimizer.detach()
    optimizer = forge.attach(
        pair.model, lr=1e-3, backend=backend, clip_grad_norm=limit, clip="weight", accumulation_steps=accumulation_steps
    )
    clipped = set()
    for seed in range(3):
        for micro in range(accumulation_steps):
            pair.backward(mean_square(batch(5, 6, seed=10 * seed + micro)))
        for name, p in pair.twin.named_parameters():
            if nn.utils.clip_grad_norm_([p], limit) > limit:
                clipped.add((seed, name))
        optimizer.step()
        optimizer.zero_grad()
        pair.oracle.step()
        pair.oracle.zero_grad()
    assert 0 < len(clipped) < 3 * len(optimizer.names)
    for (name, ours), theirs in zip(pair.model.named_parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[ours][key], pair.oracle.state[theirs][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"clip": "layer"}, "clip='layer' is unknown"), ({"clip": "weight"}, "clip='weight' without a norm")],
)
def test_a_way_to_clip_without_a_meaning(options, match):
    with pytest.raises(ValueError, match=match):
        forge.attach(mlp(6, 4), lr=1e-3, **options)


def test_coverage_shows_how_each_weight_waited():
    """Few tokens keep the factors; where they would outgrow an fp32 gradient they are summed up."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
    optimizer = forge.attach(model, lr=1e-3, accumulation_steps=None)
    assert [row.waits_as for row in optimizer.coverage] == ["", ""]
    for _ in range(3):
        model(batch(8, 64)).square().mean().backward()
    optimizer.step()
    wide, narrow = optimizer.coverage
    # Three times 8 tokens of (64 + 64) fp32 numbers are less than 64 × 64; two times (64 + 4) exceed 64 × 4.
    assert (wide.waits_as, wide.waiting_bytes) == ("factors", 3 * 8 * 128 * 4)
    assert narrow.waits_as == "accumulator"
    assert narrow.waiting_bytes <= 2 * 64 * 4 * 4 + 8 * 68 * 4
    assert "factors, at most 12,288 bytes" in str(optimizer.coverage)


@backends
def test_clip_grad_norm_of_one_window(backend):
    """As torch's function between backward and step: this window alone, and a backward after it is seen."""
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True, accumulation_steps=None)
    for limit, more in ((0.05, False), (None, False), (0.02, True)):
        pair.backward(mean_square(batch(5, 6)))
        norm = pair.optimizer.clip_grad_norm_(limit)
        theirs = nn.utils.get_total_norm([p.grad for p in pair.twin.parameters()])
        torch.testing.assert_close(norm, theirs, rtol=1e-5, atol=0)
        if more:
            pair.backward(mean_square(batch(5, 6, seed=1)))
        if limit is not None:
            nn.utils.clip_grad_norm_(pair.twin.parameters(), limit)
        pair.close()
    pair.expect_equal()


def test_the_norm_of_a_window_is_measured_once(monkeypatch):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, waiting=True)
    measured, measure = [], kernels.wgrad_norms_sq
    monkeypatch.setattr(kernels, "wgrad_norms_sq", lambda *a, **k: (measured.extend(a[1]), measure(*a, **k)))
    model(batch(5, 6)).square().mean().backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("options", "limit", "error", "match"),
    [
        ({"waiting": True}, 0.0, ValueError, "clip_grad_norm=0.0"),
        ({"waiting": True}, "1", ValueError, "clip_grad_norm='1'"),
        ({"clip_grad_norm": 1.0}, 0.5, ValueError, "attach was given clip_grad_norm=1.0"),
        ({}, 0.5, RuntimeError, "updated in backward"),
    ],
)
def test_a_clip_without_a_meaning(options, limit, error, match):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, **options)
    model(batch(5, 6)).square().mean().backward()
    with pytest.raises(error, match=match):
        optimizer.clip_grad_norm_(limit)


@backends
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"accumulation_steps": 2}], ids=str)
def test_a_scale_of_every_gradient(backend, options):
    """In backward, waiting, and from ``.grad``: what a quarter of the loss gives, and the norms of that."""
    model, twin = mlp(16, 24, 8), mlp(16, 24, 8)
    twin.load_state_dict(model.state_dict())
    ours = forge.attach(model, lr=1e-2, gradient_scale=0.25, backend=backend, **options)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(3):
        for micro_batch in range(options.get("accumulation_steps", 1)):
            x = batch(9, 16, seed=2 * step + micro_batch)
            model(x).square().sum().backward()
            (twin(x).square().sum() / 4).backward()
        norms = {name: p.grad.norm() for name, p in twin.named_parameters()}
        total = torch.nn.utils.clip_grad_norm_(twin.parameters(), options.get("clip_grad_norm", math.inf))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.grad_norm, total, rtol=1e-5, atol=0)
        for name, norm in norms.items():
            torch.testing.assert_close(ours.gradient_norms[name], norm, rtol=1e-5, atol=0)
        assert ours.last_norms_sq.sum().sqrt() == pytest.approx(float(total), rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="gradient_scale=0"):
        forge.attach(mlp(4, 4), lr=1e-2, gradient_scale=0)
