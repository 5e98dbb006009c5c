"""Weights that are stored as e4m3 codes, under rules that read more than a coordinate."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import forge_megatron as forge
from forge_megatron.formats import Fp8Weight, in_memory
from tests.cpu.oracles_staged import Optimizer64
from tests.cpu.test_attach_regimes import OPTIONS, reference, tolerance
from tests.cpu.training import backends, batch, mean_square, mlp

#: Of each kind: measures that read the weight and that do not, a matrix stage with and without it, projections.
KINDS = ("lamb", "adafactor", "muon", "scion", "galore", "apollo")


def attached(rule: str, backend: str = "reference", *, device="cpu", dtype=torch.bfloat16, **options):
    """Rows of a block and a bit, and of less than a block."""
    net = mlp(70, 9, 5).to(device, dtype)
    return net, forge.attach(net, rule, backend=backend, **{"recipe": "fp8-weight", **OPTIONS[rule], **options})


def train(net, optimizer, seeds, micro_batches: int = 1):
    for seed in seeds:
        for part in range(micro_batches):
            mean_square(batch(7, 70, seed=micro_batches * seed + part).to(net[0].bias))(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(net) -> list[torch.Tensor]:
    return [tensor.detach().clone() for p in net.parameters() for tensor in in_memory(p)]


def expect_steps_of_the_reference(rule: str, backend: str, device: str, steps: int) -> None:
    formats = {"recipe": None, "weight_store": "fp8", "state_format": "fp32"}
    net, optimizer = attached(rule, backend, device=device, dtype=torch.float32, **formats)
    assert all(isinstance(net[index].weight, Fp8Weight) for index in (0, 2))
    dense = mlp(70, 9, 5).to(device)
    oracle = reference(rule, dense, optimizer)
    for seed in range(steps):
        with torch.no_grad():
            for p, source in zip(dense.parameters(), net.parameters(), strict=True):
                p.copy_(source.dequantize() if isinstance(source, Fp8Weight) else source)
        if isinstance(oracle, Optimizer64):
            oracle.take_weights()
        train(net, optimizer, [seed])
        # After ours, whose projections it takes.
        mean_square(batch(7, 70, seed=seed).to(device))(dense).backward()
        oracle.step()
        oracle.zero_grad()
        for index in (0, 2):
            exact, got = dense[index].weight.detach(), net[index].weight.dequantize()
            scales = net[index].weight.scales.float().repeat_interleave(64, 1)[:, : exact.shape[1]]
            apart = torch.maximum((exact.abs().log2().floor() - 3).exp2(), scales * 2.0**-9)
            assert ((got - exact).abs() <= apart + tolerance(rule, 1)).all(), seed
            assert ((got - exact) / apart).double().mean().abs() < 5 * 0.5 / exact.numel() ** 0.5


@backends
@pytest.mark.parametrize("rule", OPTIONS)
def test_each_step_is_the_references_rounded_to_a_neighbour(rule, backend):
    expect_steps_of_the_reference(rule, backend, "cpu", 3 if backend == "reference" else 1)


@pytest.mark.parametrize("waits", [{}, {"clip_grad_norm": 0.05, "accumulation_steps": 2}])
@pytest.mark.parametrize("rule", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(rule, waits):
    parts = waits.get("accumulation_steps", 1)
    net, optimizer = attached(rule, **waits)
    train(net, optimizer, range(4), parts)
    one, first = attached(rule, **waits)
    train(one, first, range(2), parts)
    saved = io.BytesIO()
    torch.save((one.state_dict(), first.state_dict()), saved)
    saved.seek(0)
    weights, states = torch.load(saved)
    two, second = attached(rule, **waits)
    two.load_state_dict(weights)
    second.load_state_dict(states)
    assert all(map(torch.equal, bits(one), bits(two)))
    train(two, second, range(2, 4), parts)
    assert all(map(torch.equal, bits(net), bits(two)))
    assert not torch.equal(bits(net)[0], bits(one)[0])


@backends
@pytest.mark.parametrize("rule", KINDS)
def test_a_gradient_that_is_not_finite_keeps_the_weight(rule, backend):
    """What a rule mixes with it is not finite anywhere."""
    net, optimizer = attached(rule, backend)
    train(net, optimizer, [0])
    before, states = bits(net)[:2], copy.deepcopy(optimizer.state[net[0].weight])
    x = batch(7, 70).bfloat16()
    x[:, 3] = torch.nan
    net[0](x).backward(torch.ones(7, 9, dtype=torch.bfloat16))
    optimizer.step()
    assert all(map(torch.equal, before, bits(net)[:2]))
    for name in states.keys() - {"step"}:
        kept = optimizer.state[net[0].weight][name]
        # Of the weight's own coordinates those with a finite gradient have stepped.
        same = kept == states[name]
        assert (same[:, 3] if same.shape == (9, 70) else same).all(), name
        assert kept.isfinite().all(), name


@backends
def test_how_far_a_step_moves_the_codes(backend):
    net, optimizer = attached("lamb", backend)
    before = net[0].weight.dequantize().double()
    with optimizer.measuring_updates():
        train(net, optimizer, [0])
    moved = (net[0].weight.dequantize().double() - before).norm()
    assert moved > 0
    torch.testing.assert_close(optimizer.update_norms["0.weight"].double(), moved, rtol=1e-6, atol=0)
