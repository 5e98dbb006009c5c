"""Every backend against fp64: the fused step, its norm, and its accumulation.

Without a GPU the Triton kernels run interpreted (``tests/conftest.py`` sets ``TRITON_INTERPRET``); with one, compiled.
"""

import dataclasses
import math

import kernel_cases
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BACKENDS, BF16, DEVICE, FP16, FP32, LAYOUTS, STORAGE, Case, poisoned_memory

from forge_megatron.kernels import Slot, step, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from forge_megatron.rules import get

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # numpy, of the non-finite values that some tests feed to the interpreted kernels
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def poisoned():
    with poisoned_memory():
        yield


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


SHAPES = [(1, 1), (33, 100), (64, 64), (130, 70), (1, 300), (200, 1), (16, 528), (129, 127), (786, 48), (64, 786)]
TOKENS = [17, 129, 1, 127, 7, 16, 64, 0, 17, 5]


def ids(case):
    return str(case)


@pytest.mark.parametrize("form", oracles.FORMS)
@pytest.mark.parametrize(("weight", "state", "master"), [(FP32, FP32, False), (BF16, BF16, False), (BF16, FP32, True)])
def test_a_step_of_every_rule_equals_fp64(backend, form, weight, state, master):
    case = Case((33, 70), (17,), weight, state, master, rule=form)
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, backend, DEVICE))


@pytest.mark.parametrize(("weight", "state", "master"), STORAGE)
@pytest.mark.parametrize(("shape", "tokens"), list(zip(SHAPES, TOKENS, strict=True)))
def test_a_step_equals_fp64(backend, shape, tokens, weight, state, master):
    case = Case(shape, (tokens,), weight, state, master)
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, backend, DEVICE))


@pytest.mark.parametrize(
    "case",
    [
        *(Case((33, 100), (tokens,), BF16, BF16) for tokens in (0, 1, 7, 17, 127, 129)),
        *(Case((33, 48), (17,), dtype, FP32, layout=layout) for layout in LAYOUTS for dtype in (FP32, BF16, FP16)),
        Case((33, 100), ()),
        Case((33, 100), (7, 0, 129)),
        Case((48, 80), (1, 2, 3, 4, 5, 6, 7), BF16, FP32, True),
        Case((33, 100), (), accumulator=FP32, multiplier=0.25),
        Case((33, 100), (17, 5), BF16, BF16, accumulator=FP32, multiplier=-3.0),
        Case((33, 100), (17,), BF16, FP32, True, accumulator=BF16, multiplier=0.5),
        Case((33, 100), (17,), BF16, FP32, dy=FP32),
        Case((33, 100), (17,), FP32, FP32, dy=BF16, x=FP16),
        Case((33, 100), (17,), FP32, FP32, dy=BF16, x=BF16),
        Case((33, 100), (17,), FP32, BF16),
        Case((33, 100), (17, 3), BF16, BF16, accumulator=FP32, multiplier=0.5, rule="sgd"),
        Case((33, 100), (17,), BF16, FP32, True, rule="sgd"),
    ],
    ids=ids,
)
def test_operands_of_every_kind(backend, case):
    kernel_cases.assert_right(case, kernel_cases.step_errors(case, backend, DEVICE))


def test_the_oracle_can_fail():
    """A wrong decay, a gradient that is off by 1 % and a lost token are each outside the bounds used above."""
    case = Case((33, 100), (17,), BF16, FP32, True)
    slot, segments, _, _ = kernel_cases.build(case)
    grad = oracles.wgrad(segments, None, case.shape)
    right = kernel_cases.expected(slot, grad, None)
    lost = oracles.wgrad([(dy[:-1], x[:-1]) for dy, x in segments], None, case.shape)
    for wrong in (kernel_cases.expected(slot, grad, 1.01), kernel_cases.expected(slot, lost, None)):
        assert kernel_cases.stored_error(wrong["exp_avg"].float(), right["exp_avg"]) > 100
        assert kernel_cases.stored_error(wrong["master"].float(), right["master"]) > 10
    undecayed = right["master"] + 1e-2 * slot.master.double()
    assert kernel_cases.stored_error(undecayed.float(), right["master"]) > 100


def run(slot_and_operands, backend, **changes):
    """Step a copy of a built case and return its slot."""
    slot, segments, accumulator, multiplier = kernel_cases.move(DEVICE, *slot_and_operands)
    slot = dataclasses.replace(slot, **changes)
    wgrad_step(slot, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
    return slot


@pytest.mark.parametrize("case", [Case((130, 70), (129,), *storage) for storage in STORAGE], ids=ids)
def test_triton_equals_the_reference_to_rounding(case):
    built = kernel_cases.build(case)
    theirs, ours = run(built, "reference"), run(built, "triton")
    for (name, a), (_, b) in zip(theirs.tensors(), ours.tensors(), strict=True):
        error = kernel_cases.stored_error(b, a.cpu().double())
        # Both round once: at most one unit in the last place apart, which is two of the halves allowed.
        assert error <= 2.0, name


@pytest.mark.parametrize("case", [Case((130, 70), (129, 17), *storage) for storage in STORAGE], ids=ids)
def test_a_step_is_deterministic(backend, case):
    built = kernel_cases.build(case)
    first, second = run(built, backend), run(built, backend)
    for (_, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.norm_sq, second.norm_sq)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_the_step_does_not_depend_on_how_tokens_are_cut(data):
    """Proposition 1: any partition of the token axis, and any part of it summed beforehand, gives the same step."""
    tokens = 40
    case = Case((33, 48), (tokens,))
    slot, [(dy, x)], _, _ = kernel_cases.build(case)
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=6)))
    bounds = list(zip([0, *cuts], [*cuts, tokens], strict=True))
    segments = data.draw(st.permutations([(dy[a:b], x[a:b]) for a, b in bounds]))
    before = data.draw(st.integers(0, len(segments)))
    want = kernel_cases.expected(slot, oracles.wgrad([(dy, x)], None, case.shape), None)
    for backend in BACKENDS:
        accumulator = torch.zeros(case.shape, device=DEVICE)
        moved, parts, _, _ = kernel_cases.move(DEVICE, slot, segments, None, None)
        wgrad_accumulate(parts[:before], accumulator, backend=backend)
        wgrad_step(moved, parts[before:], accumulator=accumulator, backend=backend)
        for name, tensor in moved.tensors():
            assert kernel_cases.stored_error(tensor, want[name]) <= 1.0


@settings(deadline=None, max_examples=6)
@given(row=st.integers(1, 69), column=st.integers(1, 39))
def test_the_step_does_not_depend_on_how_the_weight_is_cut(row, column):
    """Proposition 1 for the weight's own axes: stepping four blocks of a weight is stepping the weight."""
    case = Case((70, 40), (9,))
    built = kernel_cases.build(case)
    for backend in BACKENDS:
        whole = run(built, backend)
        cut, [(dy, x)], _, _ = kernel_cases.move(DEVICE, *built)
        norm_sq = 0.0
        for rows in (slice(0, row), slice(row, None)):
            for columns in (slice(0, column), slice(column, None)):
                states = tuple(state[rows, columns] for state in cut.states)
                block = dataclasses.replace(cut, weight=cut.weight[rows, columns], states=states)
                wgrad_step(block, [(dy[:, rows], x[:, columns])], backend=backend)
                norm_sq += block.norm_sq.item()
        for (name, a), (_, b) in zip(whole.tensors(), cut.tensors(), strict=True):
            assert kernel_cases.stored_error(a, b.cpu().double()) <= 1.0, name
        assert norm_sq == pytest.approx(whole.norm_sq.item(), rel=1e-5)


@pytest.mark.parametrize(("weight", "state", "master"), STORAGE)
def test_nothing_outside_a_weight_is_written(backend, weight, state, master):
    """Weight and states are blocks of larger buffers; their neighbours keep their bytes."""
    case = Case((33, 48), (17,), weight, state, master)
    built = kernel_cases.build(case)
    slot, segments, _, _ = kernel_cases.move(DEVICE, *built)
    buffers, names = [], []
    for name, tensor in slot.tensors():
        buffer = torch.full((40, 64), 7.0, dtype=tensor.dtype, device=DEVICE)
        buffer[3:36, 5:53] = tensor
        buffers.append(buffer)
        names.append(name)
    views = dict(zip(names, (buffer[3:36, 5:53] for buffer in buffers), strict=True))
    inside = dataclasses.replace(
        slot,
        weight=views["weight"],
        states=tuple(views[name] for name in slot.rule.states),
        master=views.get("master"),
    )
    wgrad_step(inside, segments, backend=backend)
    want = kernel_cases.expected(built[0], oracles.wgrad(built[1], None, case.shape), None)
    for name, buffer in zip(names, buffers, strict=True):
        assert kernel_cases.stored_error(views[name], want[name]) <= 1.0
        buffer[3:36, 5:53] = 7.0
        assert (buffer == 7.0).all()


def test_rows_too_far_apart_for_32_bit_offsets(backend):
    """Inside one tile the last row lies 2^31 elements after the first. Pages that are not touched take no memory."""
    case = Case((34, 48), (17,), BF16, FP32)
    built = kernel_cases.build(case)
    slot, segments, _, _ = kernel_cases.move(DEVICE, *built)
    torch.utils.deterministic.fill_uninitialized_memory = False
    far = torch.empty_strided(case.shape, (1 << 26, 1), dtype=BF16, device=DEVICE)
    torch.utils.deterministic.fill_uninitialized_memory = True
    far.copy_(slot.weight)
    wgrad_step(dataclasses.replace(slot, weight=far), segments, backend=backend)
    want = kernel_cases.expected(built[0], oracles.wgrad(built[1], None, case.shape), None)
    assert kernel_cases.stored_error(far.contiguous(), want["weight"]) <= 1.0


@pytest.mark.parametrize(("weight", "state", "master"), STORAGE)
def test_coordinates_with_a_non_finite_gradient_keep_their_bits(backend, weight, state, master):
    case = Case((33, 48), (17,), weight, state, master)
    slot, [(dy, x)], _, _ = built = kernel_cases.build(case)
    accumulator = torch.zeros(case.shape)
    bad = torch.zeros(case.shape, dtype=torch.bool)
    for (row, column), value in {(0, 0): math.nan, (5, 7): math.inf, (32, 47): -math.inf, (5, 8): math.nan}.items():
        accumulator[row, column] = value
        bad[row, column] = True
    clean = run(built, backend)
    got = run((slot, [(dy, x)], accumulator, None), backend)
    before = dict(slot.tensors())
    for (name, a), (_, b) in zip(got.tensors(), clean.tensors(), strict=True):
        assert torch.equal(a.cpu()[bad], before[name][bad]), name
        assert torch.equal(a.cpu()[~bad], b.cpu()[~bad]), name
    assert not got.norm_sq.isfinite()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_operand_spoils_only_its_row_or_column(backend, value):
    case = Case((33, 48), (17,), BF16, BF16)
    slot, [(dy, x)], _, _ = kernel_cases.build(case)
    dy[3, 4] = value
    x[5, 6] = value
    got = run((slot, [(dy, x)], None, None), backend)
    for (name, a), (_, before) in zip(got.tensors(), slot.tensors(), strict=True):
        assert torch.equal(a.cpu()[4], before[4]), name
        assert torch.equal(a.cpu()[:, 6], before[:, 6]), name
        assert a.isfinite().all()
        assert not torch.equal(a.cpu()[5], before[5])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_multiplier_changes_nothing(backend, value):
    built = kernel_cases.build(Case((33, 48), (17,), BF16, FP32, True, multiplier=value))
    got = run(built, backend)
    for (_, a), (_, before) in zip(got.tensors(), built[0].tensors(), strict=True):
        assert torch.equal(a.cpu(), before)
    assert got.norm_sq.isfinite()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("tokens", [(), (0,), (0, 0)])
def test_no_tokens_is_a_gradient_of_zero(backend, tokens, dtype):
    """As torch.optim steps a zero gradient: decay and the decay of the moments still apply."""
    parameter = torch.nn.Parameter(torch.randn(33, 48, generator=torch.Generator().manual_seed(3)))
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
    parameter.grad = torch.randn(33, 48, generator=torch.Generator().manual_seed(4))
    optimizer.step()
    state = optimizer.state[parameter]
    rule = get("adamw")
    group = rule.resolve({"lr": 1e-2, "weight_decay": 0.1})
    weight = parameter.detach().clone().to(DEVICE)
    states = tuple(state[name].clone().to(DEVICE) for name in rule.states)
    scalars = torch.tensor(rule.scalars(group, 2)).to(DEVICE)
    slot = Slot(rule, weight, states, scalars, norm_sq=torch.tensor(math.nan, device=DEVICE))
    segments = [
        (torch.empty(t, 33, dtype=dtype, device=DEVICE), torch.empty(t, 48, dtype=dtype, device=DEVICE)) for t in tokens
    ]
    wgrad_step(slot, segments, backend=backend)

    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    oracles.assert_rounding(weight, parameter.detach(), 2)
    for name, got in zip(rule.states, states, strict=True):
        oracles.assert_rounding(got, state[name], 2)
    assert slot.norm_sq.item() == 0.0


@pytest.mark.parametrize("out", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    [
        Case((33, 100), (17,)),
        Case((33, 100), (17, 0, 129), BF16),
        Case((786, 48), (129,), FP16),
        Case((33, 100), (17,), accumulator=FP32),
        Case((33, 100), (), accumulator=BF16),
        Case((33, 100), (0,)),
        Case((33, 100), (1, 2, 3, 4, 5, 6, 7), BF16, layout="strided"),
    ],
    ids=ids,
)
def test_the_norm_equals_fp64(backend, case, out):
    built = kernel_cases.build(case)
    _, segments, accumulator, _ = kernel_cases.move(DEVICE, *built)
    got = torch.tensor(math.nan, dtype=out, device=DEVICE)
    wgrad_norm_sq(segments, got, accumulator=accumulator, backend=backend)
    want = oracles.wgrad(built[1], built[2], case.shape).square().sum().item()
    assert got.item() == pytest.approx(want, rel=1e-5)


def test_the_norm_of_nothing_is_zero(backend):
    out = torch.tensor(math.nan, device=DEVICE)
    wgrad_norm_sq([], out, backend=backend)
    assert out.item() == 0.0


@pytest.mark.parametrize("accumulator", [FP32, BF16])
@pytest.mark.parametrize("operands", [FP32, BF16, FP16])
def test_accumulation_rounds_only_at_the_accumulator(backend, operands, accumulator):
    """bf16 and fp16 factors into an fp32 accumulator lose nothing of fp32, whatever the weight's dtype is."""
    case = Case((33, 100), (17, 0, 5), operands, accumulator=accumulator)
    built = kernel_cases.build(case)
    _, segments, got, _ = kernel_cases.move(DEVICE, built[0], built[1], built[2].clone(), None)
    wgrad_accumulate(segments, got, backend=backend)
    want = oracles.wgrad(built[1], built[2], case.shape)
    assert got.dtype is accumulator
    assert kernel_cases.stored_error(got, want) <= 1.0


@pytest.mark.parametrize("accumulator", [None, FP32])
@pytest.mark.parametrize("out", [FP32, BF16])
def test_a_gradient_is_written_with_one_rounding(backend, out, accumulator):
    """Into a strided part of a bucket, over whatever an earlier gradient left there."""
    case = Case((33, 100), (17, 0, 5), BF16, accumulator=accumulator)
    _, segments, added, _ = kernel_cases.move(DEVICE, *kernel_cases.build(case))
    bucket = torch.full((33, 256), torch.nan, dtype=out, device=DEVICE)
    got = bucket[:, 100:200]
    wgrad(segments, got, accumulator=added, backend=backend)
    want = oracles.wgrad(segments, added, case.shape)
    assert kernel_cases.stored_error(got, want) <= 1.0
    assert bucket[:, :100].isnan().all()
    assert bucket[:, 200:].isnan().all()
    wgrad([], got, backend=backend)
    assert not got.any()


def test_no_version_counter_moves(backend):
    slot, segments, accumulator, _ = kernel_cases.move(DEVICE, *kernel_cases.build(Case((33, 48), accumulator=FP32)))
    slot.weight.requires_grad_()
    written = [tensor for _, tensor in slot.tensors()] + [accumulator]
    versions = [tensor._version for tensor in written]
    before = slot.weight.detach().clone()
    wgrad_step(slot, segments, accumulator=accumulator, backend=backend)
    wgrad_accumulate(segments, accumulator, backend=backend)
    wgrad(segments, accumulator, backend=backend)
    step([slot], [before], backend=backend)
    assert [tensor._version for tensor in written] == versions
    assert not torch.equal(slot.weight, before)
