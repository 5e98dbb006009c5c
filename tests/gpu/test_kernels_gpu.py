"""The compiled kernels against fp64 written by hand: shapes, dtypes, layouts, TF32, and weights beyond 2^31 elements.

``python tests/gpu/test_kernels_gpu.py OUT.json`` writes every error as JSON, with what it was measured on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

# The oracles are the CPU tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import kernel_cases
import oracles
from kernel_cases import BF16, FP16, FP32, LAYOUTS, STORAGE, Case

from forge_megatron.kernels import Slot, step, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from forge_megatron.rules import get

#: (shape, tokens): both tile sizes, both alignments, and shapes smaller than any tile.
SHAPES = [
    ((1, 1), 1),
    ((33, 100), 17),
    ((64, 50257), 129),
    ((100, 33), 7),
    ((129, 127), 128),
    ((512, 512), 512),
    ((1024, 3072), 2048),
    ((2049, 2047), 513),
    ((2256, 2256), 127),
    ((4096, 4096), 1000),
]
CASES = [
    *(Case(shape, (tokens,), weight, state, master) for shape, tokens in SHAPES for weight, state, master in STORAGE),
    *(Case((256, 384), (tokens,), BF16, BF16) for tokens in (0, 1, 7, 15, 17, 127, 129, 5743)),
    *(Case((256, 384), (129,), dtype, FP32, layout=layout) for layout in LAYOUTS for dtype in (BF16, FP32)),
    Case((2048, 2048), (128, 0, 17, 256), BF16, BF16, accumulator=FP32, multiplier=0.25),
    Case((2048, 2048), (64,) * 9, BF16, FP32, True, accumulator=BF16, multiplier=3.0),
    Case((2048, 2048), (), BF16, BF16),
    Case((256, 384), (129,), BF16, FP32, dy=FP32),
    Case((256, 384), (129,), FP32, FP32, dy=BF16, x=FP16),
    Case((256, 384), (129,), BF16, BF16, rule="sgd", multiplier=0.5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_equals_fp64(case):
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, "triton", "cuda"))


@pytest.mark.parametrize("case", CASES[: len(STORAGE) * len(SHAPES)], ids=str)
def test_a_step_is_deterministic(case):
    built = kernel_cases.build(case)
    runs = []
    for _ in range(2):
        slot, segments, _, _ = kernel_cases.move("cuda", *built)
        wgrad_step(slot, segments)
        runs.append([tensor for _, tensor in slot.tensors()] + [slot.norm_sq])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def norm_error(case: Case) -> float:
    built = kernel_cases.build(case)
    _, segments, accumulator, _ = kernel_cases.move("cuda", *built)
    out = torch.tensor(torch.nan, dtype=torch.float64, device="cuda")
    wgrad_norm_sq(segments, out, accumulator=accumulator)
    want = oracles.wgrad(built[1], built[2], case.shape).square().sum().item()
    return abs(out.item() - want) / want


NORMS = [
    Case((33, 100), (17,)),
    Case((1024, 3072), (2048, 17), BF16),
    Case((2049, 2047), (129,), FP16, accumulator=FP32),
]


@pytest.mark.parametrize("case", NORMS, ids=str)
def test_the_norm_equals_fp64(case):
    assert norm_error(case) <= kernel_cases.norm_bound(case)


@pytest.mark.parametrize("accumulator", [FP32, BF16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_accumulation_equals_fp64(dtype, accumulator):
    built = kernel_cases.build(Case((1024, 1000), (129, 7), dtype, accumulator=accumulator))
    _, segments, got, _ = kernel_cases.move("cuda", *built)
    wgrad_accumulate(segments, got)
    assert kernel_cases.stored_error(got, oracles.wgrad(built[1], built[2], got.shape)) <= 1.0


def relative_error(precision: str) -> float:
    """Of an fp32 accumulation under one setting of torch, to the largest element."""
    dy, x = torch.randn(2048, 512), torch.randn(2048, 768)
    got = torch.zeros(512, 768, device="cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        wgrad_accumulate([(dy.cuda(), x.cuda())], got)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    want = oracles.wgrad([(dy, x)], None, got.shape)
    return ((got.cpu().double() - want).abs().max() / want.abs().max()).item()


def test_fp32_operands_multiply_as_torch_is_set():
    assert relative_error("ieee") < 5e-6
    assert 1e-5 < relative_error("tf32") < 2e-3


def large_weight_error() -> float:
    """The last rows of a weight of more than 2^31 elements, in units of what is allowed."""
    rows, columns = 40_000, 60_000
    generator = torch.Generator("cuda").manual_seed(0)
    rule = get("sgd")
    scalars = torch.tensor(rule.scalars(rule.resolve({"lr": 1.0}), 1), device="cuda")
    weight = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    dy = torch.randn(16, rows, generator=generator, device="cuda").bfloat16()
    x = torch.randn(16, columns, generator=generator, device="cuda").bfloat16()
    wgrad_step(Slot(rule, weight, (), scalars), [(dy, x)])
    errors = []
    for block in (slice(0, 128), slice(rows // 2, rows // 2 + 128), slice(rows - 128, rows)):
        want = -oracles.wgrad([(dy[:, block], x)], None, (128, columns))
        errors.append(kernel_cases.stored_error(weight[block], want))
    return max(errors)


def test_a_weight_of_more_than_2_31_elements():
    assert large_weight_error() <= 1.0


def multi_tensor_errors() -> dict[str, float]:
    """One call for many shapes and dtypes: the worst error in units of what is allowed, and the norm's, relative."""
    generator = torch.Generator().manual_seed(0)
    rule = get("adamw")
    scalars = torch.tensor(rule.scalars(rule.resolve(kernel_cases.HYPERPARAMETERS["adamw"]), kernel_cases.STEP))
    shapes = [(4096,), (7,), (1,), (1 << 20,), (33, 100), (0,), (1024, 50), (151_936, 8)]
    slots, grads = [], []
    for shape in shapes:
        for weight, state, master in STORAGE:
            w = torch.randn(shape, generator=generator).to(weight)
            states = tuple((torch.rand(shape, generator=generator) + 0.5).to(state) for _ in rule.states)
            copy = w.float() if master else None
            slots.append(Slot(rule, w, states, scalars, copy, norm_sq=torch.tensor(torch.nan)))
            grads.append(torch.randn(shape, generator=generator).to(weight))
    moved = [kernel_cases.move("cuda", slot, [], None, None)[0] for slot in slots]
    step(moved, [grad.cuda() for grad in grads], multiplier=torch.tensor(0.5, device="cuda"))
    errors = {"step": 0.0, "norm_sq": 0.0}
    for old, new, grad in zip(slots, moved, grads, strict=True):
        want = kernel_cases.expected(old, grad.double(), 0.5)
        for name, tensor in new.tensors():
            errors["step"] = max(errors["step"], kernel_cases.stored_error(tensor, want[name]))
        exact = grad.double().square().sum().item()
        errors["norm_sq"] = max(errors["norm_sq"], abs(new.norm_sq.item() - exact) / max(exact, 1e-30))
    return errors


def test_the_multi_tensor_step_equals_fp64():
    errors = multi_tensor_errors()
    assert errors["step"] <= 1.0
    assert errors["norm_sq"] <= 1e-5


def test_a_captured_step_replays_with_new_hyperparameters():
    """Hyperparameters and multiplier are read from device memory: a CUDA graph follows the schedule."""
    built = kernel_cases.build(Case((256, 384), (129,), BF16, FP32, True, multiplier=0.5))
    slot, segments, _, multiplier = kernel_cases.move("cuda", *built)
    wgrad_step(slot, segments, multiplier=multiplier)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad_step(slot, segments, multiplier=multiplier)
    for (_, target), (_, source) in zip(slot.tensors(), built[0].tensors(), strict=True):
        target.copy_(source)
    slot.scalars.copy_(torch.tensor(slot.rule.scalars(slot.rule.resolve({"lr": 0.0, "weight_decay": 0.0}), 5)))
    graph.replay()
    assert torch.equal(slot.weight.cpu(), built[0].weight)
    slot.scalars.copy_(built[0].scalars)
    for (_, target), (_, source) in zip(slot.tensors(), built[0].tensors(), strict=True):
        target.copy_(source)
    graph.replay()
    want = kernel_cases.expected(built[0], oracles.wgrad(built[1], None, (256, 384)), 0.5)
    for name, tensor in slot.tensors():
        assert kernel_cases.stored_error(tensor, want[name]) <= 1.0


def measure() -> dict:
    """Every error above, unjudged, with the device and the versions."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "unit": "weights and states: largest error over what is allowed (half a unit in the last place of the stored "
        "dtype, and 16 and one for each 64 tokens fp32 roundings of the largest magnitude), right if at most 1; "
        "norm_sq: relative",
        "step": {str(case): kernel_cases.step_errors(case, "triton", "cuda") for case in CASES},
        "norm_sq": {str(case): norm_error(case) for case in NORMS},
        "fp32_accumulation": {precision: relative_error(precision) for precision in ("ieee", "tf32")},
        "more_than_2_31_elements": large_weight_error(),
        "multi_tensor": multi_tensor_errors(),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=1) + "\n")
