"""Experts in one tensor by the Hopper kernel: the portable kernel's bits, or fp64's, on sums that are exact.

Every operand has rows of NaN before the first expert's tokens and after the last's.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from exact_steps import BF16, FP32, STORAGE, assert_equal_steps, copied, differences, make, raw, whole_numbers

from forge_megatron.kernels import (
    GroupedRows,
    choice,
    wgrad,
    wgrad_accumulate,
    wgrad_norm_sq,
    wgrad_step,
)
from forge_megatron.kernels.hopper_config import CONFIGS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="NOT RUN: needs compute capability 9.0",
)

#: Tokens of each expert: none, one, odd numbers, whole blocks of both sizes, at either end and in between.
COUNTS = (0, 129, 1, 0, 64, 37, 300, 32, 0)
MANY = tuple(7 * i % 23 * (i % 3 > 0) for i in range(50))

#: Less than a sub-tile, tails on both sides; MANY has several tiles a CTA.
CASES = [((8, 16), COUNTS), ((136, 1040), COUNTS), ((264, 400), MANY)]


@pytest.fixture(params=CONFIGS)
def config(request, monkeypatch):
    """Every launch takes this configuration, whatever the table says."""
    from forge_megatron.kernels import hopper_wgrad

    monkeypatch.setattr(hopper_wgrad, "choose_config", lambda *sizes: request.param)
    return request.param


def routed(shape, counts, before=3, after=5, dtype=BF16):
    """One segment of ``counts`` tokens between foreign ones."""
    bounds = torch.tensor([before, *itertools.accumulate(counts, initial=before)][1:], dtype=torch.int32)
    first, end = int(bounds[0]), int(bounds[-1])
    dy, x = (whole_numbers(end + after, extent, dtype=dtype) for extent in shape)
    for tensor in (dy, x):
        tensor[:first] = torch.nan
        tensor[end:] = torch.nan
    return GroupedRows(dy, bounds.cuda()), x


def spans(segment):
    bounds = segment[0].bounds.tolist()
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def exact(segments, shape):
    experts = len(segments[0][0].bounds) - 1
    total = torch.zeros(experts, *shape, dtype=torch.float64, device="cuda")
    for segment in segments:
        dy, x = segment
        for expert, own in enumerate(spans(segment)):
            total[expert] += dy.rows[own].double().t() @ x[own].double()
    return total


@pytest.mark.parametrize("storage", STORAGE)
def test_a_step_of_experts_has_the_portable_kernels_bits(config, storage):
    torch.manual_seed(0)
    for shape, counts in CASES:
        assert_equal_steps(make((len(counts), *shape), storage), [routed(shape, counts)])


def test_experts_without_tokens_are_stepped_with_a_zero_gradient(config):
    """The decay of AdamW alone, by its formula: lr * weight_decay = 1e-3 of a weight whose moments were 0."""
    shape, counts = CASES[1]
    slot = make((len(counts), *shape), "fp32-master")
    for state in slot.states:
        state.zero_()
    before = slot.master.clone()
    wgrad_step(slot, [routed(shape, counts)], backend="hopper")
    stepped = torch.tensor(counts, device="cuda") > 0
    torch.testing.assert_close(slot.master[~stepped], before[~stepped] * (1 - 1e-3), rtol=1e-6, atol=0.0)
    assert not any(state[~stepped].any() for state in slot.states)
    assert all(bool((state[stepped] != 0).float().mean() > 0.5) for state in slot.states)


@pytest.mark.parametrize("storage", STORAGE)
def test_what_is_not_finite_stays_in_its_expert(storage):
    """Infinite dY and NaN X of one expert, whose neighbours' last blocks of tokens would reach into its rows."""
    torch.manual_seed(1)
    shape, counts = CASES[1]
    clean = routed(shape, counts)
    dy, x = clean[0].rows.clone(), clean[1].clone()
    own = spans(clean)[4]
    dy[own], x[own] = torch.inf, torch.nan
    slot = make((len(counts), *shape), storage)
    other = copied(slot)
    before = copied(slot)
    assert_equal_steps(slot, [(GroupedRows(dy, clean[0].bounds), x)], steps=1)
    assert not slot.norm_sq.isfinite()
    wgrad_step(other, [clean], multiplier=torch.tensor(2.0**-9, device="cuda"), backend="hopper")
    for (name, got), (_, clean_one), (_, old) in zip(slot.tensors(), other.tensors(), before.tensors(), strict=True):
        if name == "weight" and before.master is not None:
            old = before.master.to(BF16)
        assert torch.equal(raw(got[4]), raw(old[4])), name
        rest = [expert for expert in range(len(counts)) if expert != 4]
        assert torch.equal(raw(got[rest]), raw(clean_one[rest])), name


@pytest.mark.parametrize("many", [3, 6])
@pytest.mark.parametrize("added", [None, FP32, BF16], ids=["alone", "fp32", "bf16"])
def test_several_uses_and_what_was_accumulated(config, many, added):
    """Each use has its own routes; more than a launch takes are brought together on the device."""
    torch.manual_seed(2)
    shape, counts = CASES[1]
    segments = [routed(shape, counts[use:] + counts[:use], before=use) for use in range(many)]
    segments.insert(1, routed(shape, (0,) * len(counts), before=0, after=0))
    accumulator = None if added is None else whole_numbers(len(counts), *shape, dtype=added, largest=100)
    assert_equal_steps(make((len(counts), *shape), "sr-store"), segments, accumulator)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_gradients_of_experts_are_written_and_accumulated_with_one_rounding(config, dtype):
    torch.manual_seed(3)
    for shape, counts in CASES:
        whole = (len(counts), *shape)
        segments = [routed(shape, counts), routed(shape, counts[::-1])]
        want = exact(segments, shape)
        out = torch.full(whole, torch.nan, dtype=dtype, device="cuda")
        wgrad(segments, out, backend="hopper")
        assert torch.equal(out, want.to(dtype))
        accumulator = whole_numbers(*whole, dtype=dtype, largest=100)
        total = want + accumulator.double()
        wgrad(segments, out, accumulator=accumulator, backend="hopper")
        assert torch.equal(out, total.to(dtype))
        wgrad_accumulate(segments, accumulator, backend="hopper")
        assert torch.equal(accumulator, total.to(dtype))
        norm_sq = torch.full((), torch.nan, device="cuda")
        wgrad_norm_sq(segments, norm_sq, shape=torch.Size(whole), backend="hopper")
        torch.testing.assert_close(norm_sq.double(), want.square().sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("rule", ["lion", "rmsprop", "adagrad"])
def test_other_rules_of_experts_have_the_portable_kernels_bits(rule):
    torch.manual_seed(4)
    shape, counts = CASES[1]
    assert_equal_steps(make((len(counts), *shape), "sr-store", rule), [routed(shape, counts)], steps=1)


def test_fp16_experts(config):
    shape, counts = CASES[1]
    segments = [routed(shape, counts, dtype=torch.float16)]
    out = torch.empty(len(counts), *shape, device="cuda")
    wgrad(segments, out, backend="hopper")
    assert torch.equal(out.double(), exact(segments, shape))


def test_neighbours_in_memory_are_neither_read_nor_written():
    """Rows inside wider ones, and experts that are some of a tensor's, whose bounds lie anywhere in memory."""
    torch.manual_seed(5)
    shape, counts = CASES[1]
    dy, x = routed(shape, counts)
    wide = [torch.full((len(x), tensor.shape[1] + 24), torch.nan, dtype=BF16, device="cuda") for tensor in (dy.rows, x)]
    inside = [tensor[:, 8 : tensor.shape[1] - 16] for tensor in wide]
    for view, values in zip(inside, (dy.rows, x), strict=True):
        view.copy_(values)
    some = slice(1, 6)
    out = torch.full((len(counts), *shape), 7.0, device="cuda")
    wgrad([(GroupedRows(inside[0], dy.bounds).of_experts(some), inside[1])], out[some], backend="hopper")
    assert torch.equal(out[some].double(), exact([(dy, x)], shape)[some])
    assert bool((out[:1] == 7).all())
    assert bool((out[6:] == 7).all())


def test_a_later_launch_follows_its_own_routes():
    """Triton converts the arguments of the first launch only; a captured launch reads the bounds of its replay."""
    torch.manual_seed(6)
    shape, counts = CASES[1]
    slot = make((len(counts), *shape), "bf16")
    portable = copied(slot)
    first, second = routed(shape, counts), routed(shape, counts[::-1])
    for backend, each in (("hopper", slot), ("triton", portable)):
        for segment in (first, second, first):
            wgrad_step(each, [segment], backend=backend)
    assert not differences(slot, portable)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wgrad_step(slot, [first], backend="hopper")
    first[0].bounds.copy_(second[0].bounds)
    first[0].rows.copy_(second[0].rows)
    first[1].copy_(second[1])
    graph.replay()
    wgrad_step(portable, [second], backend="triton")
    assert not differences(slot, portable)


def test_auto_takes_it_for_what_it_can_take_and_what_it_cannot_is_refused_by_name():
    taken = [routed((64, 64), (3, 0, 5))]
    assert choice.choose_experts(make((3, 64, 64), "bf16"), taken, None, "auto") == "hopper"
    shape, counts = (36, 51), (3, 0, 5)
    slot = make((len(counts), *shape), "bf16")
    before = copied(slot)
    segments = [routed(shape, counts)]
    with pytest.raises(ValueError, match=r'w: backend="hopper" takes bf16 or fp16 operands'):
        wgrad_step(slot, segments, backend="hopper")
    assert not differences(slot, before)
    assert choice.choose_experts(slot, segments, None, "auto") == "triton"
    nothing = [routed((64, 64), (0, 0, 0), before=0, after=0)]
    assert choice.choose_experts(make((3, 64, 64), "bf16"), nothing, None, "hopper") == "triton"
