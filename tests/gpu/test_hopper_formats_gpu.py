"""The Hopper kernel's formats and modes against the portable kernel's bits, on gradients whose sums are exact.

Factors are small whole numbers, so that every order of the sum gives the same fp32 gradient: then nothing may differ.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forge_megatron.formats import Noise, Origin, state_format
from forge_megatron.formats.noise import words
from forge_megatron.kernels import Slot, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from forge_megatron.kernels.hopper_config import CONFIGS
from forge_megatron.rules import get

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="NOT RUN: needs compute capability 9.0",
)

BF16, FP32 = torch.bfloat16, torch.float32

#: state format, weight store
STORAGE = {
    "bf16": ("bf16", "nearest"),
    "fp32-master": ("fp32", "master"),
    "sr-store": ("bf16", "stochastic"),
    "sr-store, fp32": ("fp32", "stochastic"),
}

#: One sub-tile and less, tails on both sides, several tiles a CTA. Rows of bf16 are 16-byte aligned.
SHAPES = [(8, 16), (136, 1040), (2088, 1616)]
TOKENS = (129, 0, 37)


@pytest.fixture(params=CONFIGS)
def config(request, monkeypatch):
    """Every launch takes this configuration, whatever the table says."""
    from forge_megatron.kernels import hopper_wgrad

    monkeypatch.setattr(hopper_wgrad, "choose_config", lambda *sizes: request.param)
    return request.param


def whole_numbers(*shape, dtype=BF16, largest=3):
    return torch.randint(-largest, largest + 1, shape, device="cuda").to(dtype)


def factors(shape, tokens=TOKENS):
    return [tuple(whole_numbers(count, extent) for extent in shape) for count in tokens]


def make(shape, storage, rule="adamw", step=3):
    fmt, store = STORAGE[storage]
    rule = get(rule)
    weight = torch.randn(shape, device="cuda").to(BF16)
    master = weight.float() + 1e-4 * torch.randn(shape, device="cuda") if store == "master" else None
    states = []
    for name in rule.states:
        nonnegative = name in rule.nonnegative
        values = torch.rand(shape, device="cuda") * 10 ** (4 * torch.rand(shape, device="cuda") - 4)
        values = values if nonnegative else values - values.mean()
        kept = state_format(fmt).allocate(name, weight, nonnegative=nonnegative)
        states.append(kept[name].copy_(values))
    noise = None
    if store == "stochastic":
        origin = Origin("layers.0.weight", row=5, column=8, split=100, jump=1000)
        row = torch.tensor(words(origin, shape[1], 7, step), device="cuda")
        noise = Noise(row, origin, shape[1])
    scalars = torch.tensor(rule.scalars(rule.resolve({"lr": 1e-2, "weight_decay": 0.1}), step), device="cuda")
    norm_sq = torch.zeros((), device="cuda")
    return Slot(rule, weight, tuple(states), scalars, master, norm_sq, "w", noise)


def copied(slot):
    def copy(tensors):
        return tuple(tensor.clone() for tensor in tensors)

    master = None if slot.master is None else slot.master.clone()
    norm_sq = torch.zeros_like(slot.norm_sq)
    return replace(
        slot,
        weight=slot.weight.clone(),
        states=copy(slot.states),
        scales=copy(slot.scales),
        master=master,
        norm_sq=norm_sq,
    )


def raw(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differences(got, want):
    """What differs, by name: how many coordinates, and the first."""
    tensors = [*zip(got.tensors(), want.tensors(), strict=True)]
    pairs = [(name, a, b) for (name, a), (_, b) in tensors]
    found = {}
    for name, a, b in pairs:
        different = (raw(a) != raw(b)).nonzero()
        if len(different):
            first = tuple(different[0].tolist())
            found[name] = (len(different), a.numel(), first, a[first].item(), b[first].item())
    return found


def assert_equal_steps(slot, segments, accumulator=None, steps=2):
    portable = copied(slot)
    multiplier = torch.tensor(2.0**-9, device="cuda")
    for _ in range(steps):
        for each, backend in ((slot, "hopper"), (portable, "triton")):
            wgrad_step(each, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
    assert not differences(slot, portable)
    if portable.norm_sq.isfinite():
        torch.testing.assert_close(slot.norm_sq, portable.norm_sq, rtol=1e-5, atol=0.0)
    else:
        assert not slot.norm_sq.isfinite()


@pytest.mark.parametrize("storage", STORAGE)
def test_a_step_has_the_portable_kernels_bits(config, storage):
    torch.manual_seed(0)
    for shape in SHAPES:
        assert_equal_steps(make(shape, storage), factors(shape))


@pytest.mark.parametrize("storage", STORAGE)
def test_what_is_not_finite_keeps_the_same_bits(storage):
    torch.manual_seed(1)
    shape = SHAPES[1]
    segments = factors(shape)
    dy, x = segments[0]
    dy[64, 50], dy[128, 99], x[0, 237] = torch.inf, -torch.inf, torch.nan
    assert_equal_steps(make(shape, storage), segments, steps=1)


@pytest.mark.parametrize("added", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("storage", ["bf16", "fp32-master", "sr-store"])
def test_what_was_accumulated_is_stepped_too(storage, added):
    torch.manual_seed(2)
    shape = SHAPES[2]
    accumulator = whole_numbers(*shape, dtype=added, largest=100)
    before = accumulator.clone()
    assert_equal_steps(make(shape, storage), factors(shape), accumulator)
    assert torch.equal(accumulator, before)


def exact(segments, shape):
    total = torch.zeros(shape, dtype=torch.float64, device="cuda")
    for dy, x in segments:
        total += dy.double().t() @ x.double()
    return total


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_gradient_is_written_and_accumulated_with_one_rounding(config, dtype):
    torch.manual_seed(3)
    for shape in SHAPES:
        segments = factors(shape)
        want = exact(segments, shape)
        out = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
        wgrad(segments, out, backend="hopper")
        assert torch.equal(out, want.to(dtype))
        accumulator = whole_numbers(*shape, dtype=dtype, largest=100)
        total = want + accumulator.double()
        wgrad(segments, out, accumulator=accumulator, backend="hopper")
        assert torch.equal(out, total.to(dtype))
        wgrad_accumulate(segments, accumulator, backend="hopper")
        assert torch.equal(accumulator, total.to(dtype))
        norm_sq = torch.full((), torch.nan, device="cuda")
        wgrad_norm_sq(segments, norm_sq, backend="hopper")
        torch.testing.assert_close(norm_sq.double(), want.square().sum(), rtol=1e-5, atol=0.0)


def test_a_gradient_that_is_not_finite_is_written_as_it_is():
    segments = factors((136, 1040))
    segments[0][0][3, 7] = torch.nan
    accumulator = torch.zeros(136, 1040, device="cuda")
    wgrad_accumulate(segments, accumulator, backend="hopper")
    assert accumulator[7].isnan().all()
    assert accumulator.isnan().sum() == 1040


@pytest.mark.parametrize("rule", ["lion", "rmsprop", "adagrad"])
def test_other_rules_have_the_portable_kernels_bits(rule):
    torch.manual_seed(4)
    assert_equal_steps(make(SHAPES[1], "sr-store", rule), factors(SHAPES[1]), steps=1)
