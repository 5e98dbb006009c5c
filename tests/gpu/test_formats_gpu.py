"""The formats' bits on a GPU are those of the CPU: 8-bit codes, and stochastically rounded weights and codes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# The cases are the CPU tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import code_cases
import exact_steps
import test_fp8_weight
import test_fp8_weight_regimes
import test_hopper_formats_gpu
from code_cases import CODES
from test_stochastic import FAR, slot, stepped

from forge_megatron.formats import Origin, scale_name, state_format
from forge_megatron.formats.noise import words
from forge_megatron.kernels import Slot, cublas_wgrad, wgrad_step
from forge_megatron.kernels.blocks import slot_of


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_codes_and_values_are_the_cpus(code):
    code_cases.assert_kernels_agree(code, "cuda")


def on_gpu(slot: Slot) -> Slot:
    noise = replace(slot.noise, words=slot.noise.words.cuda())
    return replace(slot, weight=slot.weight.cuda(), scalars=slot.scalars.cuda(), noise=noise)


@pytest.mark.parametrize("origin", [Origin("w"), Origin("w", row=5, column=8), FAR], ids=["whole", "part", "far"])
@pytest.mark.parametrize("shape", [(33, 100), (512, 512), (2048, 2048), (257, 2050)])
def test_weights_are_rounded_as_on_the_cpu(shape, origin):
    expected = stepped(slot(shape, origin), "reference", fused=False)
    for fused in (True, False):
        assert torch.equal(stepped(on_gpu(slot(shape, origin)), "auto", fused=fused).cpu(), expected)


@pytest.mark.parametrize("state_format", ["bf16", "int8"])
@pytest.mark.parametrize("shape", [(33, 100), (512, 512), (257, 2050)])
def test_codes_of_weights_are_rounded_as_on_the_cpu(shape, state_format):
    def step(backend, **options):
        # One of its own: on the CPU the step writes to it.
        slot = test_fp8_weight.ones(shape, Origin("w"), state_format)
        return test_fp8_weight.stepped(slot, backend, **options)

    expected = step("reference", fused=False)
    for fused in (True, False):
        got = step("auto", fused=fused, device="cuda")
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("rule", test_fp8_weight_regimes.OPTIONS)
def test_codes_under_rules_of_whole_matrices(rule):
    test_fp8_weight_regimes.expect_steps_of_the_reference(rule, "auto", "cuda", 3)


@pytest.mark.parametrize("storage", ["bf16", "fp32-master", "sr-store", "int8"])
def test_a_scratch_of_some_rows_has_the_bits_of_a_whole_one(storage, monkeypatch):
    """On gradients whose sums are exact, so that cuBLAS may take another algorithm."""
    torch.manual_seed(0)
    shape = (1000, 272)
    segments = test_hopper_formats_gpu.factors(shape)
    first = exact_steps.make(shape, "bf16" if storage == "int8" else storage)
    if storage == "int8":
        state = {}
        for name in first.rule.states:
            state |= state_format("int8").allocate(name, first.weight, nonnegative=name in first.rule.nonnegative)
        states = [state[each] for each in first.rule.states]
        scales = [state[scale_name(each)] for each in first.rule.states]
        first = replace(first, states=tuple(states), scales=tuple(scales))
    second = exact_steps.copied(first)
    for each, nbytes in ((first, 1 << 28), (second, 4 * 272 * 300)):
        monkeypatch.setattr(cublas_wgrad, "SCRATCH_BYTES", nbytes)
        for _ in range(2):
            wgrad_step(each, segments, multiplier=torch.tensor(2.0**-9, device="cuda"), backend="cublas")
    assert not exact_steps.differences(second, first)
    assert all(map(torch.equal, second.scales, first.scales))
    torch.testing.assert_close(second.norm_sq, first.norm_sq, rtol=1e-5, atol=0.0)


def test_random_bits_of_a_part_are_this_steps():
    """A launch remembers where a part's words are, and another step's must be there then."""
    torch.manual_seed(0)
    segments = test_hopper_formats_gpu.factors((512, 256))
    whole = exact_steps.make((512, 256), "sr-store")
    parts = exact_steps.copied(whole)
    for step in (3, 4, 5):
        row = torch.tensor(words(whole.noise.origin, 256, 7, step), device="cuda")
        whole.noise.words.copy_(row)
        wgrad_step(whole, segments, backend="hopper")
        for rows in (slice(0, 128), slice(128, 512)):
            part = [(dy[:, rows], x) for dy, x in segments]
            wgrad_step(slot_of(parts, rows, None), part, backend="hopper")
        assert torch.equal(parts.weight, whole.weight)
