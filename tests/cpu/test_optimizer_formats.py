"""Recipes: what a step of each store and state format leaves, against torch and fp64, and its bytes."""

import copy

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import backends, batch, mlp


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}], ids=["immediate", "accumulated"])
def test_an_fp32_master_against_torch_with_an_fp32_copy(backend, dtype, options):
    """torch's mixed precision: a half-precision model, fp32 copies that AdamW steps, rounded back."""
    torch.manual_seed(0)
    model = nn.Linear(12, 7, dtype=dtype)
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    oracle = torch.optim.AdamW(copies, lr=1e-3)
    optimizer = forge.attach(model, lr=1e-3, recipe="fp32-master", backend=backend, **options)
    for step in range(5):
        weights = [c.detach().to(dtype) for c in copies]
        for weight, p in zip(weights, model.parameters(), strict=True):
            assert torch.equal(weight, p.detach())
        for c in copies:
            c.grad = torch.zeros_like(c)
        for micro in range(2 if options else 1):
            x = batch(9, 12, seed=2 * step + micro).to(dtype)
            dy = batch(9, 7, seed=50 + 2 * step + micro).to(dtype)
            model(x).backward(dy)
            copies[0].grad += dy.float().t() @ x.float()
        copies[1].grad += model.bias.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        oracle.step()
    for p, c in zip(model.parameters(), copies, strict=True):
        torch.testing.assert_close(optimizer.state[p]["master"], c.detach(), rtol=0, atol=1e-6)
        assert torch.equal(p.detach(), optimizer.state[p]["master"].to(dtype))


@backends
def test_small_updates_reach_a_master_and_not_a_bf16_weight(backend):
    for recipe, moves in (("fp32-master", True), ("fp32-state", False)):
        layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(layer.weight)
        optimizer = forge.attach(layer, lr=1e-3, weight_decay=0.0, recipe=recipe, backend=backend)
        for _ in range(8):
            layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Eight steps of 1e-3: 0.992 rounds to 0.9922 in bf16, and a single 1e-3 is under half a unit of 1.
        assert bool((layer.weight < 1).all()) is moves


@backends
def test_bf16_states_are_rounded_to_nearest_even_once_a_step(backend):
    """m and v decoded, stepped in fp32, and encoded: reproduced here with torch's own cast."""
    torch.manual_seed(0)
    layer = nn.Linear(12, 7, bias=False)
    optimizer = forge.attach(layer, lr=1e-3, recipe="bf16-state", weight_decay=0.0, backend=backend)
    exp_avg = torch.zeros(7, 12, dtype=torch.bfloat16)
    exp_avg_sq = torch.zeros_like(exp_avg)
    for step in range(3):
        x, dy = batch(9, 12, seed=step), batch(9, 7, seed=20 + step)
        layer(x).backward(dy)
        optimizer.step()
        g = dy.t() @ x
        exp_avg = (exp_avg.float() + (g - exp_avg.float()) * 0.1).bfloat16()
        exp_avg_sq = (exp_avg_sq.float() * 0.999 + g * g * 0.001).bfloat16()
        state = optimizer.state[layer.weight]
        # A sum in another order may fall on the other side of a tie.
        for ours, expected in ((state["exp_avg"], exp_avg), (state["exp_avg_sq"], exp_avg_sq)):
            assert ours.dtype is torch.bfloat16
            torch.testing.assert_close(ours.float(), expected.float(), rtol=2**-7, atol=1e-9)
            assert (ours == expected).float().mean() > 0.95


@backends
@pytest.mark.parametrize("when", ["before_the_first_step", "later"])
def test_weights_that_are_loaded_after_attach_reach_the_master(backend, when):
    torch.manual_seed(0)
    model = mlp(6, 8, 4).bfloat16()
    optimizer = forge.attach(model, lr=1e-3, recipe="fp32-master", backend=backend)
    x = batch(5, 6).bfloat16()
    if when == "later":
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    loaded = {key: torch.full_like(value, 0.25) for key, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    model(x).float().square().mean().backward()
    optimizer.step()
    for p in model.parameters():
        assert (optimizer.state[p]["master"] - 0.25).abs().max() < 5e-3
        assert (p - 0.25).abs().max() < 5e-3


@backends
def test_a_write_to_some_coordinates_keeps_the_masters_of_the_others(backend):
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    optimizer = forge.attach(layer, lr=1e-4, recipe="fp32-master", backend=backend)
    for _ in range(3):
        layer(batch(5, 8).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    master = optimizer.state[layer.weight]["master"]
    before = master.clone()
    with torch.no_grad():
        layer.weight[0].fill_(0.5)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    layer(batch(5, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert torch.equal(master[1:], before[1:])
    assert (master[0] == 0.5).all()


@pytest.mark.parametrize(
    ("recipe", "dtype", "per_weight"),
    [
        (None, torch.float32, 8),
        (None, torch.bfloat16, 4),
        ("fp32-state", torch.bfloat16, 8),
        ("bf16-state", torch.float32, 4),
        ("fp32-master", torch.bfloat16, 12),
        ("fp32-master", torch.float32, 8),
    ],
)
def test_coverages_bytes(recipe, dtype, per_weight):
    model = mlp(6, 8, 4).to(dtype)
    optimizer = forge.attach(model, lr=1e-3, recipe=recipe)
    rows = {row.name: row for row in optimizer.coverage}
    assert rows["0.weight"].state_bytes == 48 * per_weight
    assert rows["2.bias"].state_bytes == 4 * per_weight
    assert optimizer.coverage.state_bytes == sum(p.numel() for p in model.parameters()) * per_weight
    assert optimizer.coverage.fused_parameters == 48 + 32
    lines = str(optimizer.coverage).splitlines()
    assert lines[0].split() == ["parameter", "shape", "stepped", "state", "bytes", "waited", "as", "kernel"]
    assert "80 of 92 parameters fused" in lines[-1]


def test_states_exist_from_attach_on():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    for p in model.parameters():
        state = optimizer.state[p]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"] == 0
        assert state["exp_avg"].shape == p.shape
        assert not state["exp_avg_sq"].any()


@backends
def test_sgd_is_another_rule(backend):
    model, twin = mlp(6, 8, 4), mlp(6, 8, 4)
    optimizer = forge.attach(model, "sgd", lr=0.1, weight_decay=0.01, backend=backend)
    oracle = torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.01)
    for seed in range(3):
        for m, o in ((model, optimizer), (twin, oracle)):
            m(batch(5, 6, seed=seed)).square().mean().backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@backends
@pytest.mark.parametrize("options", [{"maximize": True}, {"betas": (0.0, 0.0)}, {"eps": 0.5}, {"weight_decay": 0.0}])
def test_adamws_own_options(backend, options):
    model, twin = mlp(6, 8, 4), mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, backend=backend, **options)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3, **options)
    for seed in range(3):
        for m, o in ((model, optimizer), (twin, oracle)):
            m(batch(5, 6, seed=seed)).square().mean().backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_a_master_is_an_fp32_number_whatever_its_bits():  # field log row 109
    """Nothing is split into halves: all 2^16 low parts of numbers of every kind, through a checkpoint and a step."""
    low = torch.arange(1 << 16, dtype=torch.int64)
    high = [0x3F80, 0xBF80, 0x0000, 0x8000, 0x0001, 0x7F7F, 0xFF7F, 0x3F81]
    bits = torch.stack([(h << 16) | low for h in high])
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    wanted = bits.view(torch.float32)
    assert wanted.isfinite().all()
    layer = torch.nn.Linear(1 << 16, len(high), bias=False, dtype=torch.bfloat16)
    optimizer = forge.attach(layer, "sgd", lr=0.0, recipe="fp32-master")
    saved = optimizer.state_dict()
    saved["state"][0]["master"] = wanted.clone()
    layer.load_state_dict({"weight": wanted.bfloat16()})
    optimizer.load_state_dict(saved)
    layer(torch.zeros(1, 1 << 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    kept = optimizer.state[layer.weight]["master"]
    # A weight of -0 minus 0 is -0, and so are all bits of the others.
    assert torch.equal(kept.view(torch.int32), bits)
    assert torch.equal(layer.weight.view(torch.int16), wanted.bfloat16().view(torch.int16))


def test_a_difference_below_zero_is_nan_as_torchs():
    """The mean of a gradient that does not vary, one bf16 above the root of the mean square."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).bfloat16()
    twin = copy.deepcopy(model)
    options = {"lr": 1e-2, "alpha": 1.0, "centered": True}
    pairs = [
        (model, forge.attach(model, "rmsprop", **options)),
        (twin, torch.optim.RMSprop(twin.parameters(), **options)),
    ]
    for net, optimizer in pairs:
        for first in (True, False):
            net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            if first:
                optimizer.step()
                optimizer.zero_grad()
                state = optimizer.state[net[0].weight]
                state["square_avg"].fill_(1.0)
                state["grad_avg"].fill_(1.0078125)
        optimizer.step()
    assert twin[0].weight.isnan().all()
    assert torch.equal(model[0].weight.isnan(), twin[0].weight.isnan())
