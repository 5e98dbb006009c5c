"""The elementwise step after a GEMM into scratch, against fp64; the GEMM itself needs a GPU (tests/gpu)."""

import kernel_cases
import pytest
import torch
from kernel_cases import BF16, DEVICE, FP16, FP32, STORAGE, Case, poisoned_memory
from triton.runtime.jit import JITFunction

from forge_megatron.kernels import cublas_wgrad, step
from forge_megatron.kernels.triton_language import Named
from tests.cpu.code_cases import raw
from tests.cpu.test_state_codes import slot as slot_of_codes
from tests.cpu.test_state_codes import written

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    with poisoned_memory():
        yield


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("multiplier", [None, 0.25])
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (64, 48), (129, 127)])
@pytest.mark.parametrize(("weight", "state", "master"), STORAGE)
def test_a_dense_step_equals_fp64(weight, state, master, shape, multiplier, rule):
    case = Case(shape, (), weight, state, master, multiplier=multiplier, rule=rule)
    built = kernel_cases.build(case)
    slot, _, _, scale = kernel_cases.move(DEVICE, *built)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    cublas_wgrad.dense_step(slot, grad.to(DEVICE), scale)
    want = kernel_cases.expected(built[0], grad.double(), multiplier)
    for name, tensor in slot.tensors():
        assert kernel_cases.stored_error(tensor, want[name]) <= 1.0, name
    norm_sq = grad.double().square().sum().item()
    assert abs(slot.norm_sq.item() - norm_sq) <= 1e-5 * norm_sq


def test_coordinates_that_are_not_finite_keep_every_bit():
    built = kernel_cases.build(Case((33, 100), (), BF16, FP32, True))
    slot, _, _, _ = kernel_cases.move(DEVICE, *built)
    grad = torch.zeros(33, 100, device=DEVICE)
    grad[3, 5], grad[32, 99], grad[0, 0] = torch.inf, torch.nan, -torch.inf
    cublas_wgrad.dense_step(slot, grad, None)
    finite = grad.isfinite().cpu()
    for (name, got), (_, before) in zip(slot.tensors(), built[0].tensors(), strict=True):
        assert torch.equal(got.cpu()[~finite], before[~finite]), name
        assert not torch.equal(got.cpu()[finite], before[finite]), name


def test_what_the_path_takes():
    def takes(case):
        slot, segments, accumulator, _ = kernel_cases.build(case)
        return cublas_wgrad.supports(slot, segments, accumulator)

    assert takes(Case((33, 100), (17, 0), BF16, BF16))
    assert takes(Case((33, 100), (17,), FP16, FP32, True, layout="transposed"))
    assert not takes(Case((33, 100), (0,), BF16, BF16))
    assert not takes(Case((33, 100), (17,), FP32, FP32))
    assert not takes(Case((33, 100), (17,), BF16, FP32, dy=FP16))
    assert not takes(Case((33, 100), (17,), BF16, BF16, accumulator=FP32))


@pytest.mark.parametrize("shape", [(33, 100), (40, 128)])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_dense_step_of_codes_equals_the_step_of_the_reference(name, shape):
    """Rows of whole blocks, and rows with a block that is shorter; one block has a gradient that is not finite."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    grad[3, 70] = torch.inf
    ours, theirs = (slot_of_codes(shape, name, "lion", FP32) for _ in range(2))
    cublas_wgrad.dense_step(ours, grad, None)
    step([theirs], [grad], backend="reference")
    for (key, mine), other in zip(written(ours).items(), written(theirs).values(), strict=True):
        if mine.element_size() == 1:
            # The order of a lerp's two roundings is the languages' own.
            assert (raw(mine) == raw(other)).float().mean() > 0.999, key
        else:
            torch.testing.assert_close(mine, other, rtol=2.0**-8, atol=1e-6)


def test_a_kernels_name_on_disk_follows_the_sources_of_its_functions():
    def encode(x):
        return x

    first = encode

    def encode(x):
        return x + 1

    codes = [Named((Named((JITFunction(function), 8)),)) for function in (first, first, encode)]
    assert str(codes[0]) == str(codes[2])
    assert codes[0].cache_key == codes[1].cache_key
    assert codes[0].cache_key != codes[2].cache_key
