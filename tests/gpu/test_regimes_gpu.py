"""Rules in stages on a GPU: as on the CPU, from exact gradients; what a step holds; the same bits each time."""

import sys
from pathlib import Path

import pytest
import torch

# The cases are the CPU tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import oracles
from test_kernel_regimes import RULES, factors, make, tensors

from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get


def moved(slot: Slot) -> Slot:
    """A copy on the GPU; the step count stays on the host."""
    return Slot(
        slot.rule,
        slot.weight.cuda(),
        tuple(state.cuda() for state in slot.states),
        slot.scalars.cuda(),
        None if slot.master is None else slot.master.cuda(),
        slot.norm_sq.cuda(),
        slot.name,
        statistics=tuple(statistic.cuda() for statistic in slot.statistics),
        step=slot.step,
    )


@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (256, 512), (1023, 514)])
@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_a_step_equals_the_cpus(name, operands, shape):
    """Factors of whole numbers: G is the same on both, so nothing but the stages' own rounding is left."""
    segments = [tuple(factor.to(operands) for factor in factors(shape, 65))]
    slot = make(name, shape, taken=3)
    twin = moved(slot)
    wgrad_step(slot, segments, multiplier=torch.tensor(0.25), backend="reference")
    on_device = [tuple(factor.cuda() for factor in segment) for segment in segments]
    wgrad_step(twin, on_device, multiplier=torch.tensor(0.25, device="cuda"))
    torch.testing.assert_close(twin.norm_sq.cpu(), slot.norm_sq, rtol=1e-5, atol=0)
    for got, want in zip(tensors(twin), tensors(slot), strict=True):
        if name in ("muon", "scion") and want is slot.weight:
            atol = 0.1 * 1.5 * max(1.0, shape[0] / shape[1]) ** 0.5 * 4 * torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(got.cpu(), want, rtol=0, atol=atol)
        else:
            # A norm over the whole layer is summed in another order: its square root's length of roundings.
            oracles.assert_rounding(got, want, 16 + (shape[0] * shape[1]) ** 0.5 / 8)


@pytest.mark.parametrize("name", RULES)
def test_two_runs_have_the_same_bits(name):
    """No statistic is summed by atomics: replicas stay equal."""
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(512, n, generator=generator).bfloat16().cuda() for n in (768, 1024))
    slots = [moved(make(name, (768, 1024), taken=3)) for _ in range(2)]
    for slot in slots:
        wgrad_step(slot, [(dy, x)])
    assert all(map(torch.equal, *map(tensors, slots)))


@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("name", ["adafactor", "adalomo", "adam_mini", "lamb", "lars", "muon", "scion", "sm3"])
def test_a_later_launch_finds_the_scratch_where_it_lies_then(name, tokens):
    """Launches are remembered; the twin's are forgotten before each step. A tensor in between moves the scratch."""
    generator = torch.Generator().manual_seed(0)
    slot, twin = (moved(make(name, (768, 1024), dtype=torch.bfloat16, taken=3)) for _ in range(2))
    held = []
    for _ in range(4):
        dy, x = (torch.randn(tokens, n, generator=generator).bfloat16().cuda() for n in (768, 1024))
        for each in (slot, twin):
            twin.memo.clear()
            wgrad_step(each, [(dy, x)])
        held.append(torch.full((768, 1024), float("nan"), device="cuda"))
        assert all(map(torch.equal, tensors(slot), tensors(twin)))
    assert slot.memo


@pytest.mark.parametrize("name", ["muon", "lamb", "lars", "adafactor", "galore", "apollo"])
def test_a_step_holds_a_few_fp32_copies_of_one_layer_at_most_and_returns_them(name):
    shape = (2048, 4096)
    layer = 4 * shape[0] * shape[1]
    slot = moved(make(name, shape, dtype=torch.bfloat16, taken=3))
    dy, x = (torch.randn(256, n, device="cuda", dtype=torch.bfloat16) for n in shape)
    # Launches remember small tables of addresses, until their scratch has come to lie where it stays.
    for _ in range(3):
        wgrad_step(slot, [(dy, x)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wgrad_step(slot, [(dy, x)])
    assert torch.cuda.memory_allocated() == before
    held = (torch.cuda.max_memory_allocated() - before) / layer
    # Low rank: factors in fp32. Otherwise the scratch, cuBLAS's own where it is chosen, and the matrix stage's.
    assert held < (0.5 if get(name).regime == "projected" else 4.0), f"{held:.2f} layers"


def test_a_stack_of_matrices_is_stepped_like_each_alone():
    slots = [moved(make("muon", (256, 512))) for _ in range(3)]
    alone = [moved(make("muon", (256, 512))) for _ in range(3)]
    grads = [torch.randn(256, 512, device="cuda") for _ in slots]
    step(slots, grads)
    for slot, grad in zip(alone, grads, strict=True):
        step([slot], [grad])
    atol = 0.1 * 1.5 * 4 * torch.finfo(torch.bfloat16).eps
    for slot, twin in zip(slots, alone, strict=True):
        assert torch.equal(slot.states[0], twin.states[0])
        torch.testing.assert_close(slot.weight, twin.weight, rtol=0, atol=atol)
