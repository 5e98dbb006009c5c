"""The Hopper kernel's formats and modes against the portable kernel's bits, on gradients whose sums are exact.

Factors are small whole numbers, so that every order of the sum gives the same fp32 gradient: then nothing may differ.
"""

from __future__ import annotations

import pytest
import torch
from exact_steps import BF16, FP32, STORAGE, assert_equal_steps, make, whole_numbers

from forge_megatron.kernels import wgrad, wgrad_accumulate, wgrad_norm_sq
from forge_megatron.kernels.hopper_config import CONFIGS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="NOT RUN: needs compute capability 9.0",
)

#: One sub-tile and less, tails on both sides, several tiles a CTA. Rows of bf16 are 16-byte aligned.
SHAPES = [(8, 16), (136, 1040), (2088, 1616)]
TOKENS = (129, 0, 37)


@pytest.fixture(params=CONFIGS)
def config(request, monkeypatch):
    """Every launch takes this configuration, whatever the table says."""
    from forge_megatron.kernels import hopper_wgrad

    monkeypatch.setattr(hopper_wgrad, "choose_config", lambda *sizes: request.param)
    return request.param


def factors(shape, tokens=TOKENS):
    return [tuple(whole_numbers(count, extent) for extent in shape) for count in tokens]


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
