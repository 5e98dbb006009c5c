"""Stochastic rounding: unbiased, without a dead zone, and the same bits wherever and however a weight is stepped."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.formats import Noise, Origin
from forge_megatron.formats.noise import columns_of, key, random_bits, words
from forge_megatron.formats.philox import philox, round_stochastically
from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get
from tests.cpu.training import backends, batch, expect_bit_equal, mean_square, mlp, snapshot

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_words_that_its_authors_publish(counter, key, expected):
    called = philox(*(torch.tensor([int(word, 16)]) for word in (counter + " " + key).split()))
    assert " ".join(f"{word.item():08x}" for word in called) == expected


def bits(count: int, seed: int = 0) -> torch.Tensor:
    noise = Noise(torch.tensor(words(Origin("w"), count, seed, 1)), Origin("w"), count)
    return random_bits(noise, 0, count)


@pytest.mark.parametrize("unit", [1.0, 2.0**-10, 2.0**-130], ids=["one", "small", "subnormal"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_goes_to_its_two_neighbours_in_proportion(unit, sign):
    count = 1 << 16
    below = torch.tensor(sign * unit).bfloat16().float()
    ulp = unit * 2.0**-7 if unit > 2.0**-126 else 2.0**-133
    for fraction in (0.25, 0.9375, 2.0**-9):
        x = below + sign * ulp * fraction
        assert below.abs() < x.abs()
        rounded = round_stochastically(x.expand(count), bits(count)).float()
        up = ((rounded - below) / (sign * ulp)).double()
        assert set(up.unique().tolist()) == {0.0, 1.0}
        # Five standard deviations of a mean of independent draws.
        assert abs(up.mean() - fraction) < 5 * math.sqrt(fraction * (1 - fraction) / count)


def test_what_bf16_holds_stays_and_what_is_finite_stays_finite():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16).float()
    kept = round_stochastically(every, bits(every.numel()))
    assert torch.equal(kept.isnan(), every.isnan())
    finite = ~every.isnan()
    assert torch.equal(kept[finite].view(torch.int16), every[finite].bfloat16().view(torch.int16))
    largest = torch.full((4096,), torch.finfo(torch.float32).max)
    assert (round_stochastically(largest, bits(4096)) == torch.finfo(BF16).max).all()
    assert (round_stochastically(-largest, bits(4096)) == -torch.finfo(BF16).max).all()


def slot(shape, origin: Origin, seed: int = 3, at: int = 7) -> Slot:
    """A weight of ones under SGD, which rounds each step of a gradient of 0.3 up or down."""
    rule = get("sgd")
    scalars = torch.tensor(rule.scalars(rule.resolve({"lr": 2.0**-9}), 1))
    columns = columns_of(torch.Size(shape), origin)
    noise = Noise(torch.tensor(words(origin, columns, seed, at)), origin, columns)
    return Slot(rule, torch.ones(shape, dtype=BF16), (), scalars, noise=noise, name=origin.name)


def stepped(slot: Slot, backend: str, *, fused: bool) -> torch.Tensor:
    device = slot.weight.device
    if fused:
        dy = torch.full((1, slot.weight.shape[0]), 0.3, device=device)
        wgrad_step(slot, [(dy, torch.ones(1, slot.weight.shape[1], device=device))], backend=backend)
    else:
        step([slot], [torch.full(slot.weight.shape, 0.3, device=device)], backend=backend)
    return slot.weight


FAR = Origin("w", row=2**33, column=2**35 + 3, split=10, jump=7)


@pytest.mark.parametrize("origin", [Origin("w"), Origin("w", row=5, column=8), FAR], ids=["whole", "part", "far"])
@pytest.mark.parametrize("shape", [(33, 100), (64, 64), (130, 70)])
def test_both_backends_and_both_ways_to_step_round_alike(shape, origin):
    results = [
        stepped(slot(shape, origin), backend, fused=fused)
        for backend in ("reference", "triton")
        for fused in (True, False)
    ]
    assert 0.1 < (results[0] != 1).float().mean() < 0.2
    for other in results[1:]:
        assert torch.equal(results[0], other)


@backends
def test_parts_round_as_the_whole(backend):
    whole = stepped(slot((64, 96), Origin("w")), backend, fused=True)
    for row, column in ((0, 0), (0, 48), (32, 0), (32, 48)):
        part = stepped(slot((32, 48), Origin("w", row=row, column=column)), backend, fused=True)
        assert torch.equal(part, whole[row : row + 32, column : column + 48])
    # Rank 1's halves of a gated first linear, of two ranks.
    halves = stepped(slot((32, 96), Origin("w", row=16, split=16, jump=16)), backend, fused=True)
    assert torch.equal(halves, torch.cat([whole[16:32], whole[48:64]]))
    # A flat piece that begins and ends inside a row.
    piece = stepped(slot((1000,), Origin("w", start=100, columns=96)), backend, fused=False)
    assert torch.equal(piece, whole.flatten()[100:1100])


@backends
def test_rows_that_are_stepped_by_themselves_round_as_the_whole(backend):
    """An expert, or a rank's rows, of a weight whose halves lie apart in the whole one; from either half on."""
    origin = Origin("w", row=16, split=16, jump=16)
    whole = stepped(slot((32, 96), origin), backend, fused=True)
    for first in (8, 24):
        part = slot((32 - first, 96), origin)
        part.noise = slot((32, 96), origin).noise.below(first)
        assert torch.equal(stepped(part, backend, fused=True), whole[first:])


@backends
def test_a_weight_that_lies_by_columns_rounds_by_rows(backend):
    by_rows = stepped(slot((12, 20), Origin("w")), backend, fused=False)
    transposed = slot((12, 20), Origin("w"))
    transposed = replace(transposed, weight=transposed.weight.t().contiguous().t())
    assert torch.equal(stepped(transposed, backend, fused=False), by_rows)


def test_bits_are_of_seed_weight_and_step():
    first = slot((8, 100), Origin("w")).noise
    same = [Origin("w"), Origin("v")]
    keys = {key(seed, origin.name, at) for seed in (0, 1) for origin in same for at in (1, 2, 3)}
    assert len(keys) == 12
    assert torch.equal(random_bits(first, 0, 800), random_bits(slot((8, 100), Origin("w")).noise, 0, 800))
    for other in (slot((8, 100), Origin("w"), at=8), slot((8, 100), Origin("w"), seed=4), slot((8, 100), Origin("v"))):
        agree = (random_bits(first, 0, 800) >> 31) == (random_bits(other.noise, 0, 800) >> 31)
        assert 0.4 < agree.float().mean() < 0.6


def test_two_weights_of_one_origin_are_refused():
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=BF16) for _ in range(2))
    same = {layer.weight: Origin("decoder.layers.0.weight") for layer in layers}
    with pytest.raises(ValueError, match=r"1\.weight and 0\.weight are both .*their roundings would be equal"):
        forge.attach(layers, lr=1e-3, recipe="sr-store", origins=same)
    with pytest.raises(TypeError, match=r"seed='0' is not a whole number"):
        forge.attach(layers, lr=1e-3, recipe="sr-store", seed="0")


def test_no_dead_zone():  # field log row 98
    """A constant update of 1e-3 for 100 steps from 1: nearest never moves, and the mean of a random walk is exact."""
    for store, mean, tolerance in (("nearest", 1.0, 0.0), ("stochastic", 0.9, 3e-4)):
        layer = nn.Linear(400, 250, bias=False, dtype=BF16)
        nn.init.ones_(layer.weight)
        optimizer = forge.attach(layer, "sgd", lr=1e-3, weight_store=store)
        for _ in range(100):
            layer(torch.ones(1, 400, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert abs(layer.weight.double().mean() - mean) <= tolerance
        # A hundred steps, each of a unit of 2^-8 with a probability of 0.256.
        assert abs(layer.weight.double().std() - 0.017 * (mean != 1.0)) < 1e-3


@pytest.mark.parametrize(("store", "mean", "tolerance"), [("nearest", 1.0, 0.0), ("stochastic", 0.99005, 3e-4)])
def test_a_decay_below_half_a_unit_is_not_lost(store, mean, tolerance):  # field log row 94
    """A thousand decays of 1e-5 without a gradient."""
    layer = nn.Linear(160, 125, bias=False, dtype=BF16)
    nn.init.ones_(layer.weight)
    optimizer = forge.attach(layer, lr=1e-4, weight_decay=0.1, weight_store=store)
    for _ in range(1000):
        layer(torch.zeros(1, 160, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(layer.weight.double().mean() - mean) <= tolerance


@backends
def test_decay_and_the_parameters_without_a_linear_are_rounded_too(backend):  # field log row 94
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).bfloat16()
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = forge.attach(model, lr=1e-3, weight_decay=0.5, recipe="sr-store", backend=backend)
    for _ in range(4):
        (model(torch.arange(64)).sum() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        # Four decays of 5e-4, each an eighth of the distance to the neighbour below 1.
        drift = 1 - p.double().mean().item()
        spread = math.sqrt(4 * 2.0**-8 * 5e-4 / p.numel())
        assert abs(drift - 4 * 5e-4) < 5 * spread, name
        assert optimizer.state[p]["exp_avg"].dtype is BF16


def train(seed: int, steps: int, backend: str, *, wrapped: bool = False, **options):
    model = mlp(12, 20, 8).bfloat16()
    wrapper = nn.ModuleDict({"module": model}) if wrapped else model
    optimizer = forge.attach(wrapper, lr=1e-3, recipe="sr-store", seed=seed, backend=backend, **options)
    run(model, optimizer, range(steps))
    return model, optimizer


def run(model, optimizer, steps) -> None:
    for at in steps:
        mean_square(batch(6, 12, seed=at).bfloat16())(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@backends
def test_replicas_stay_equal_and_another_seed_differs(backend):
    ours = snapshot(*train(5, 3, backend))
    expect_bit_equal(ours, snapshot(*train(5, 3, backend)))
    expect_bit_equal(ours[:4], snapshot(*train(5, 3, backend, wrapped=True))[:4])
    expect_bit_equal(ours[:4], snapshot(*train(5, 3, backend, waiting=True))[:4])
    assert not torch.equal(ours[0], snapshot(*train(6, 3, backend))[0])


def test_a_resumed_run_is_bit_equal_whatever_its_seed():
    model, optimizer = train(5, 5, "reference")
    halfway, saved = train(5, 2, "reference")
    weights, state = halfway.state_dict(), saved.state_dict()
    resumed, other = train(99, 0, "reference")
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    run(resumed, other, range(2, 5))
    expect_bit_equal(snapshot(model, optimizer), snapshot(resumed, other))
    state["forge"]["random"] = 2
    with pytest.raises(ValueError, match="version 2 of the random bits"):
        other.load_state_dict(state)


def test_a_group_has_its_own_formats():
    model = mlp(6, 8, 4).bfloat16()
    groups = [
        {"params": [model[0].weight], "state_format": "fp32"},
        {"params": [model[2].weight], "recipe": "fp32-master"},
        {"params": [model[0].bias, model[2].bias]},
    ]
    optimizer = forge.attach(model, params=groups, lr=1e-3, recipe="sr-store")
    first, second, bias = (optimizer.state[p] for p in (model[0].weight, model[2].weight, model[0].bias))
    assert first["exp_avg"].dtype is torch.float32
    assert "master" not in first
    assert second["master"].dtype is torch.float32
    assert bias["exp_avg"].dtype is BF16
    rounded = [optimizer.random.of(p) is not None for p in model.parameters()]
    assert rounded == [True, True, False, True]
    model(batch(5, 6).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["state_format"] = "bf16"
    with pytest.raises(RuntimeError, match=r"0\.weight: its group now says .*bf16.*, and its states were made for"):
        model(batch(5, 6).bfloat16()).float().square().mean().backward()
