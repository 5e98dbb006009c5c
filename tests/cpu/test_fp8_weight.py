"""Weights that are stored as e4m3 codes: how they are rounded, stepped, read, saved and resumed."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.formats import Fp8Weight, Noise, Origin, resolve_recipe
from forge_megatron.formats.fp8 import WEIGHT, encode_stochastically
from forge_megatron.formats.noise import words
from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get
from tests.cpu.training import backends

BF16 = torch.bfloat16
LR = 2e-3


def model(dtype=BF16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 10)).to(dtype)


def attached(backend="reference", *, dtype=BF16, rule="adamw", **options):
    net = model(dtype)
    return net, forge.attach(net, rule, lr=LR, backend=backend, **{"recipe": "fp8-weight", **options})


def batch(at, dtype=BF16):
    generator = torch.Generator().manual_seed(at)
    return torch.randn(24, 100, generator=generator).to(dtype), torch.randint(10, (24,), generator=generator)


def train(net, optimizer, steps):
    for at in steps:
        x, y = batch(at, next(net.parameters()).dtype)
        nn.functional.cross_entropy(net(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def bits(net):
    stored = []
    for p in net.parameters():
        tensors = (p.codes, p.scales) if isinstance(p, Fp8Weight) else (p.detach(),)
        stored += [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]
    return stored


def equal(one, other):
    return all(map(torch.equal, one, other)) and len(one) == len(other)


def test_every_code_and_its_value_stay():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()
    for random in (0, 0xFFFFFFFF):
        got = encode_stochastically(values, torch.ones(()), torch.full(values.shape, random, dtype=torch.int64))
        assert torch.equal(got.view(torch.float8_e4m3fn).float(), values)


def test_a_rounding_is_to_a_neighbour_and_right_on_average():
    below, above = (
        torch.tensor([[0.0], [13 * 2.0**-9], [1.0], [416.0]]),
        torch.tensor([[1.0], [14.0], [1.125], [448.0]]),
    )
    above[:2] *= 2.0**-9
    x = below + (above - below) * 0.3
    draws = torch.randint(0, 2**32, (4, 200_000), generator=torch.Generator().manual_seed(0))
    got = encode_stochastically(x.expand(draws.shape), torch.ones(()), draws).view(torch.float8_e4m3fn).float()
    assert ((got == below) | (got == above)).all()
    # Five standard deviations of a mean of 200,000.
    assert ((got == above).double().mean(1) - 0.3).abs().max() < 5 * (0.3 * 0.7 / 200_000) ** 0.5


def test_no_weight_is_beyond_the_largest_code():
    x = torch.tensor([448.0, 449.0, 460.0, 1e-3, 1e38]).repeat_interleave(64)[None]
    scale = WEIGHT.scale(x.view(1, 5, 64).amax(-1))
    assert (x[:, ::64] / scale <= 448).all()
    assert (x[:, ::64] / scale > 224).all()


def test_small_steps_are_taken_on_average_where_nearest_rounding_takes_none():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256, bias=False))
    optimizer = forge.attach(net, "sgd", lr=1e-3, recipe="fp8-weight")
    nn.init.ones_(dense := torch.empty(256, 256))
    net.load_state_dict({"0.weight": dense})
    for _ in range(20):
        net(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = net[0].weight.dequantize()
    assert torch.equal(Fp8Weight.of(torch.full((256, 256), 1 - 1e-3)).dequantize(), torch.ones(256, 256))
    # A mean of 65,536 coordinates, each at a distance of one code, 1/16, from 1 with probability 0.32.
    assert abs(weight.double().mean() - 0.98) < 5 * (0.02 / 16 / 65_536) ** 0.5


def ones(shape, origin, state_format="bf16"):
    """A weight of ones, whose rows go on with 400.5, under a rule without and with states."""
    rule = get("sgd" if state_format == "bf16" else "momentum")
    group = rule.resolve({"lr": 2.0**-6})
    rule = rule.variant(group)
    scalars = torch.tensor(rule.scalars(group, 1))
    noise = Noise(torch.tensor(words(origin, shape[1], 3, 7)), origin, shape[1])
    weight = torch.ones(shape, dtype=BF16)
    weight[:, -3:] = 400.5
    states, scales = (), ()
    if rule.states:
        made = resolve_recipe(BF16, state_format=state_format)[0].allocate("state", weight)
        states, scales = (made["state"],), (made["state_scale"],)
    return Slot(rule, Fp8Weight.of(weight), states, scalars, noise=noise, scales=scales, name="w")


def stepped(slot, backend, *, fused, device="cpu"):
    """Codes and scales, on the CPU, after a step of a gradient of 0.3."""
    weight = Fp8Weight(slot.weight.codes.to(device), slot.weight.scales.to(device), BF16)
    moved = {name: tuple(tensor.to(device) for tensor in getattr(slot, name)) for name in ("states", "scales")}
    noise = replace(slot.noise, words=slot.noise.words.to(device))
    slot = replace(slot, weight=weight, scalars=slot.scalars.to(device), noise=noise, **moved)
    if fused:
        dy = torch.full((1, weight.shape[0]), 0.3, device=device)
        wgrad_step(slot, [(dy, torch.ones(1, weight.shape[1], device=device))], backend=backend)
    else:
        step([slot], [torch.full(weight.shape, 0.3, device=device)], backend=backend)
    return weight.codes.view(torch.uint8).cpu(), weight.scales.cpu()


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
@pytest.mark.parametrize("shape", [(33, 100), (64, 64), (130, 70)])
def test_triton_has_the_bits_of_the_reference(shape, state_format):
    origin = Origin("w", row=5, column=8)
    results = [
        stepped(ones(shape, origin, state_format), backend, fused=fused)
        for backend in ("reference", "triton")
        for fused in (True, False)
    ]
    before = ones(shape, origin).weight.codes.view(torch.uint8)
    # 0.3 of 2^-6 is 0.0375 of the distance to the code below 1; a block beside 400.5 has a code of 1 alike.
    assert 0.02 < (results[0][0] != before)[:, :60].float().mean() < 0.12
    for other in results[1:]:
        assert equal(results[0], other)


@backends
@pytest.mark.parametrize("limit", [None, 0.5])
def test_each_step_is_torchs_rounded_to_a_neighbour(backend, limit):
    formats = {"recipe": None, "weight_store": "fp8", "state_format": "fp32"}
    net, optimizer = attached(backend, dtype=torch.float32, clip_grad_norm=limit, **formats)
    dense = model(torch.float32)
    reference = torch.optim.AdamW(dense.parameters(), lr=LR)
    for at in range(3):
        with torch.no_grad():
            for p, source in zip(dense.parameters(), net.parameters(), strict=True):
                p.copy_(source.dequantize() if isinstance(source, Fp8Weight) else source)
        x, y = batch(at, torch.float32)
        nn.functional.cross_entropy(dense(x), y).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(dense.parameters(), limit)
        reference.step()
        reference.zero_grad()
        train(net, optimizer, [at])
        exact, got = dense[0].weight.detach(), net[0].weight.dequantize()
        scales = net[0].weight.scales.repeat_interleave(64, 1)[:, :100]
        apart = torch.maximum((exact.abs().log2().floor() - 3).exp2(), scales * 2.0**-9)
        # A sum in another order moves what is rounded by fp32 roundings.
        assert ((got - exact).abs() <= apart + 1e-6).all()
        assert ((got - exact) / apart).double().mean().abs() < 5 * 0.5 / exact.numel() ** 0.5


def test_what_a_step_writes_is_never_a_second_model():
    net, optimizer = attached()
    for linear in (net[0], net[3]):
        assert isinstance(linear.weight, Fp8Weight)
        assert isinstance(linear.weight, nn.Parameter)
        assert linear.weight.codes.dtype is torch.float8_e4m3fn
    train(net, optimizer, range(2))
    held = set(optimizer.state[net[0].weight])
    assert held == {"step", "exp_avg", "exp_avg_sq"}
    assert net[0].weight.grad is None
    row = next(row for row in optimizer.coverage if row.name == "0.weight")
    assert row.fused
    assert row.how == f"fused, weight as e4m3 codes of {96 * 100 + 2 * 96 * 2:,} bytes"
    assert not isinstance(net[1].weight, Fp8Weight)


def test_what_reads_a_weight_reads_its_values():
    net, _ = attached()
    weight = net[0].weight
    values = weight.codes.float() * weight.scales.repeat_interleave(64, 1)[:, :100]
    assert torch.equal(weight.float(), values)
    assert torch.equal(weight.dequantize(), values.to(BF16))
    assert torch.equal(weight[3:5].t().float(), values[3:5].t())
    x = batch(0)[0]
    with torch.no_grad():
        assert torch.equal(net[0](x), nn.functional.linear(x, values.to(BF16), net[0].bias))
        with pytest.raises(NotImplementedError, match=r"mul_.* on a weight that is stored as e4m3 codes"):
            weight.mul_(2.0)


def test_a_gradient_that_is_not_finite_keeps_its_block():
    net, optimizer = attached()
    before = bits(net)[:2]
    x, _ = batch(0)
    x[:, 3] = torch.inf
    dy = torch.ones(24, 96, dtype=BF16)
    net[0](x).backward(dy)
    optimizer.step()
    after = bits(net)[:2]
    assert torch.equal(before[0][:, :64], after[0][:, :64])
    assert torch.equal(before[1].view(96, 2, 2)[:, 0], after[1].view(96, 2, 2)[:, 0])
    assert not torch.equal(before[0][:, 64:], after[0][:, 64:])


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}, {"accumulation_steps": 1, "skip": "atomic"}])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(options):
    net, optimizer = attached(**options)
    train(net, optimizer, range(4))
    one, first = attached(**options)
    train(one, first, range(2))
    buffer = io.BytesIO()
    torch.save((one.state_dict(), first.state_dict()), buffer)
    buffer.seek(0)
    saved, states = torch.load(buffer)
    two, second = attached(**options)
    two.load_state_dict(saved)
    second.load_state_dict(states)
    assert equal(bits(one), bits(two))
    train(two, second, range(2, 4))
    assert equal(bits(net), bits(two))


def test_a_copy_is_stored_alike_and_a_plain_checkpoint_is_rounded_to_nearest():
    net, _ = attached()
    assert equal(bits(net), bits(copy.deepcopy(net)))
    plain = model()
    net.load_state_dict(plain.state_dict())
    assert equal(bits(net)[:1], [Fp8Weight.of(plain[0].weight).codes.view(torch.uint8)])


def test_what_is_put_into_a_weight_is_rounded_to_nearest():
    """torch's writes that are no operation: torch.nn.utils and Module.to() set .data."""
    net, _ = attached()
    weight = net[0].weight
    vector = torch.nn.utils.parameters_to_vector(net.parameters()).detach() / 2
    half = weight.dequantize() / 2
    torch.nn.utils.vector_to_parameters(vector, net.parameters())
    assert torch.equal(weight.dequantize(), half)
    ones = torch.ones(2, weight.shape[1], dtype=weight.dtype)
    with torch.no_grad():
        weight[1:3] = ones
    assert torch.equal(weight.dequantize()[1:3], ones)
    before = bits(net)
    net.to("cpu", weight.dtype).share_memory()
    assert type(net[0].weight) is Fp8Weight
    assert weight.codes.is_shared()
    assert equal(before, bits(net))


@pytest.mark.parametrize("index", [0, (slice(None), 0), (0, 0)], ids=str)
def test_a_part_of_a_row_is_not_written(index):
    net, _ = attached()
    before = bits(net)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="write whole rows"):
        net[0].weight[index] = 1.0
    with pytest.raises(NotImplementedError, match=r"is given .data \[2, 2\]"):
        net[0].weight.data = torch.zeros(2, 2)
    assert equal(before, bits(net))


def test_detach_gives_ordinary_parameters_of_the_same_values():
    net, optimizer = attached()
    train(net, optimizer, range(2))
    parameter, values = net[0].weight, net[0].weight.dequantize()
    optimizer.detach()
    assert net[0].weight is parameter
    assert type(parameter) is nn.Parameter
    assert torch.equal(parameter, values)
    train(net, optimizer, range(2, 3))
    assert not torch.equal(parameter, values)


def test_weights_that_something_else_reads_are_rounded_stochastically_in_bf16():
    embedding, head = nn.Embedding(20, 16, dtype=BF16), nn.Linear(16, 20, bias=False, dtype=BF16)
    head.weight = embedding.weight
    optimizer = forge.attach(nn.Sequential(embedding, head), lr=LR, recipe="fp8-weight")
    assert type(head.weight) is nn.Parameter
    assert optimizer.random.of(head.weight) is not None


def test_what_is_refused_leaves_the_model_as_it_was():
    net = model()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(TypeError, match="no hyperparameter 'momentum'"):
        forge.attach(net, lr=LR, momentum=0.9, recipe="fp8-weight")
    assert [type(module) for module in net] == [type(module) for module in model()]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
