"""The Hopper kernel and the cuBLAS path against fp64 written by hand, every configuration and storage."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

# The oracles are the CPU tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import kernel_cases
import oracles
from kernel_cases import BF16, FP16, FP32, STORAGE, Case

from forge_megatron.kernels import choice, wgrad_step
from forge_megatron.kernels.hopper_config import CONFIGS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="NOT RUN: needs compute capability 9.0",
)

BACKENDS = ("hopper", "cublas")
HALF = [storage for storage in STORAGE if storage[0] is not FP32]

#: (shape, tokens): one tile and less, tails on each side, several tiles a CTA, few and many stages.
SHAPES = [((8, 8), 1), ((136, 1032), 17), ((1000, 712), 129), ((2088, 1608), 1024), ((256, 512), 5000)]
MANY_TILES = Case((3000, 5000), (100,), BF16, BF16, multiplier=0.37)
SEGMENTS = [
    Case((520, 1032), (129, 0, 37, 300), BF16, BF16, multiplier=0.25),
    Case((520, 1032), (64,) * 9, BF16, FP32, True, multiplier=3.0),
    Case((520, 1032), (1, 63, 65), FP16, FP32),
    Case((256, 384), (129,), FP32, FP32, dy=BF16, x=BF16),
    Case((256, 384), (129,), BF16, BF16, rule="sgd", multiplier=0.5),
]


@pytest.fixture(params=CONFIGS)
def config(request, monkeypatch):
    """Every launch takes this configuration, whatever the table says."""
    from forge_megatron.kernels import hopper_wgrad

    monkeypatch.setattr(hopper_wgrad, "choose_config", lambda *sizes: request.param)
    return request.param


@pytest.mark.parametrize(("weight", "state", "master"), HALF)
@pytest.mark.parametrize(("shape", "tokens"), SHAPES)
def test_a_hopper_step_equals_fp64(config, shape, tokens, weight, state, master):
    case = Case(shape, (tokens,), weight, state, master)
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, "hopper", "cuda"))


@pytest.mark.parametrize("case", [MANY_TILES, *SEGMENTS], ids=str)
def test_many_tiles_and_segments_equal_fp64(config, case):
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, "hopper", "cuda"))


@pytest.mark.parametrize(
    "case",
    [
        *(Case(shape, (tokens,), *storage) for shape, tokens in SHAPES for storage in HALF),
        *(Case((256, 384), (129,), BF16, BF16, layout=layout) for layout in kernel_cases.LAYOUTS),
        Case((33, 101), (17,), BF16, BF16),
        *SEGMENTS,
    ],
    ids=str,
)
def test_a_cublas_step_equals_fp64(case):
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, "cublas", "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("state", "master"), [(BF16, False), (FP32, True)])
@pytest.mark.parametrize("form", oracles.FORMS)
def test_a_step_of_every_rule_equals_fp64(form, state, master, backend):
    # Few tokens: at a sign that changes within a sum's rounding, Lion's step would turn round.
    case = Case((136, 1032), (17,), BF16, state, master, rule=form)
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, backend, "cuda"))


def inside(tensor, fill):
    """The same values in a larger buffer of ``fill``, whose rows stay 16-byte aligned; and that buffer."""
    rows, columns = tensor.shape
    buffer = torch.full((rows + 3, columns + 16), fill, dtype=tensor.dtype, device="cuda")
    view = buffer[1 : rows + 1, 8 : columns + 8]
    view.copy_(tensor)
    return view, buffer


@pytest.mark.parametrize("storage", HALF)
def test_neighbours_in_memory_are_neither_read_nor_written(config, storage):
    case = Case((1000, 712), (129, 17), *storage)
    built = kernel_cases.build(case)
    slot, segments, _, _ = kernel_cases.move("cuda", *built)
    buffers = {}
    placed = {}
    for name, tensor in slot.tensors():
        placed[name], buffers[name] = inside(tensor, 1024.0)
    states = tuple(placed[name] for name in slot.rule.states)
    slot = dataclasses.replace(slot, weight=placed["weight"], states=states, master=placed.get("master"))
    segments = [(inside(dy, torch.nan)[0], inside(x, torch.nan)[0]) for dy, x in segments]
    wgrad_step(slot, segments, backend="hopper")
    want = kernel_cases.expected(built[0], oracles.wgrad(built[1], None, case.shape), None)
    for name, buffer in buffers.items():
        assert kernel_cases.stored_error(placed[name], want[name], 146) <= 1.0
        placed[name].fill_(1024.0)
        assert bool((buffer == 1024.0).all()), name


def non_finite(storage, backend):
    case = Case((1000, 712), (129,), *storage)
    built = kernel_cases.build(case)
    dy, x = built[1][0]
    dy[64, 500], dy[128, 999], x[0, 237] = torch.inf, -torch.inf, torch.nan
    slot, segments, _, _ = kernel_cases.move("cuda", *built)
    wgrad_step(slot, segments, backend=backend)
    grad = oracles.wgrad(built[1], None, case.shape)
    finite = grad.isfinite()
    assert finite.logical_not().sum() == 2 * 712 + 998
    assert not slot.norm_sq.isfinite()
    want = kernel_cases.expected(built[0], torch.where(finite, grad, 0.0), None)
    for (name, got), (_, before) in zip(slot.tensors(), built[0].tensors(), strict=True):
        got = got.cpu()
        assert torch.equal(got[~finite], before[~finite]), name
        assert kernel_cases.stored_error(got[finite], want[name][finite], 129) <= 1.0


@pytest.mark.parametrize("storage", HALF)
def test_coordinates_that_are_not_finite_keep_every_bit(config, storage):
    non_finite(storage, "hopper")


@pytest.mark.parametrize("storage", HALF)
def test_coordinates_that_are_not_finite_keep_every_bit_after_cublas(storage):
    non_finite(storage, "cublas")


def outputs(case, backend, built):
    slot, segments, _, multiplier = kernel_cases.move("cuda", *built)
    wgrad_step(slot, segments, multiplier=multiplier, backend=backend)
    return [tensor for _, tensor in slot.tensors()] + [slot.norm_sq]


def test_a_hopper_step_is_deterministic(config):
    built = kernel_cases.build(MANY_TILES)
    first = outputs(MANY_TILES, "hopper", built)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, outputs(MANY_TILES, "hopper", built), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [MANY_TILES, *SEGMENTS], ids=str)
def test_a_later_launch_is_as_the_first(case, backend):
    """Triton converts the arguments of the first launch only."""
    built = kernel_cases.build(case)
    slot, segments, _, multiplier = kernel_cases.move("cuda", *built)
    doubled = None if multiplier is None else multiplier * 2
    wgrad_step(slot, [(dy * 2, x * 2) for dy, x in segments], multiplier=doubled, backend=backend)
    for (_, tensor), (_, before) in zip(slot.tensors(), built[0].tensors(), strict=True):
        tensor.copy_(before)
    wgrad_step(slot, segments, multiplier=multiplier, backend=backend)
    written = [*(tensor for _, tensor in slot.tensors()), slot.norm_sq]
    assert all(torch.equal(a, b) for a, b in zip(written, outputs(case, backend, built), strict=True))


def chosen(case):
    slot, segments, accumulator, _ = kernel_cases.move("cuda", *kernel_cases.build(case))
    return choice.choose_for(slot, segments, accumulator, "auto")


def test_auto_takes_what_the_operands_allow():
    assert chosen(Case((2048, 1024), (512,), BF16, BF16)) == "hopper"
    assert chosen(Case((2048, 1024), (64,) * 9, FP16, FP32, True)) == "hopper"
    assert chosen(Case((256, 384), (129,), BF16, BF16, layout="transposed")) == "cublas"
    assert chosen(Case((256, 384), (129,), BF16, BF16, layout="strided")) == "cublas"
    assert chosen(Case((256, 384), (129,), BF16, BF16, accumulator=FP32)) == "hopper"
    assert chosen(Case((256, 384), (129,), FP32, FP32)) == "triton"
    assert chosen(Case((33, 101), (129,), BF16, BF16)) == "triton"
    assert chosen(Case((256, 384), (0,), BF16, BF16)) == "triton"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_follows_its_hyperparameters(backend):
    built = kernel_cases.build(Case((520, 1032), (300,), BF16, BF16))
    slot, segments, _, _ = kernel_cases.move("cuda", *built)
    wgrad_step(slot, segments, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad_step(slot, segments, backend=backend)
    for (_, tensor), (_, before) in zip(slot.tensors(), built[0].tensors(), strict=True):
        tensor.copy_(before)
    rule = slot.rule
    group = rule.resolve({"lr": 0.3, "weight_decay": 0.2})
    slot.scalars.copy_(torch.tensor(rule.scalars(group, 7)))
    graph.replay()
    oracle = oracles.ORACLES["adamw"](lr=0.3, weight_decay=0.2)
    grad = oracles.wgrad(built[1], None, (520, 1032))
    weight, states = oracle.step(built[0].weight.double(), tuple(s.double() for s in built[0].states), grad, 7)
    assert kernel_cases.stored_error(slot.weight, weight, 300) <= 1.0
    for got, want in zip(slot.states, states, strict=True):
        assert kernel_cases.stored_error(got, want, 300) <= 1.0
