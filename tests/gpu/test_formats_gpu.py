"""The formats' bits on a GPU are those of the CPU: 8-bit codes, and stochastically rounded weights and codes."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# The cases are the CPU tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import code_cases
import test_fp8_weight
from code_cases import CODES
from test_stochastic import FAR, slot, stepped

from forge_megatron.formats import Origin
from forge_megatron.kernels import Slot


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
