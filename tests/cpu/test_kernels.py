"""Every backend against fp64: the fused step, its norm, its accumulation, and the multi-tensor step.

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
from kernel_cases import BF16, FP16, FP32, LAYOUTS, STORAGE, Case

from forge_megatron.kernels import Slot, resolve_backend, step, wgrad_accumulate, wgrad_norm_sq, wgrad_step
from forge_megatron.rules import get

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton")

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # numpy, of the non-finite values that some tests feed to the interpreted kernels
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def poisoned():
    """``torch.empty`` returns NaN, so that what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


SHAPES = [(1, 1), (33, 100), (64, 64), (130, 70), (1, 300), (200, 1), (16, 528), (129, 127), (786, 48), (64, 786)]
TOKENS = [17, 129, 1, 127, 7, 16, 64, 0, 17, 5]


def ids(case):
    return str(case)


@pytest.mark.parametrize(("weight", "state", "master"), STORAGE)
@pytest.mark.parametrize(("shape", "tokens"), list(zip(SHAPES, TOKENS, strict=True)))
def test_a_step_equals_fp64(backend, shape, tokens, weight, state, master):
    case = Case(shape, (tokens,), weight, state, master)
    kernel_cases.assert_right(kernel_cases.step_errors(case, backend, DEVICE))


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
    kernel_cases.assert_right(kernel_cases.step_errors(case, backend, DEVICE))


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


def test_strides_beyond_32_bits_inside_a_tile(backend):
    """Rows far apart in memory: offsets inside a tile pass 2^31 bytes' worth of elements unless they are 64-bit."""
    case = Case((3, 48), (17,))
    built = kernel_cases.build(case)
    slot, segments, _, _ = kernel_cases.move(DEVICE, *built)
    far = torch.empty_strided((3, 48), (1 << 23, 1), device=DEVICE)
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


def multi_tensor_slots(shapes, storage, rule="adamw"):
    """A slot for each shape and gradients of the weights' dtype, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    rule = get(rule)
    slots, grads = [], []
    for index, (shape, (weight, state, master)) in enumerate(zip(shapes, storage, strict=True)):
        w = torch.randn(shape, generator=generator).to(weight)
        slots.append(
            Slot(
                rule,
                w,
                tuple((torch.rand(shape, generator=generator) + 0.5).to(state) for _ in rule.states),
                torch.tensor(
                    rule.scalars(rule.resolve(kernel_cases.HYPERPARAMETERS[rule.name]), kernel_cases.STEP), dtype=FP32
                ),
                master=w.float() if master else None,
                norm_sq=torch.tensor(math.nan),
                name=f"parameter {index}",
            )
        )
        grads.append(torch.randn(shape, generator=generator).to(weight))
    return slots, grads


def move_slot(slot):
    return kernel_cases.move(DEVICE, slot, [], None, None)[0]


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize("multiplier", [None, 0.25])
def test_the_multi_tensor_step_equals_fp64(backend, rule, multiplier):
    shapes = [(7,), (), (4096,), (2, 3, 5), (0,), (4097,), (16, 16), (5000,), (3, 0), (128,), (33, 100), (1,)]
    storage = [STORAGE[index % len(STORAGE)] for index in range(len(shapes))]
    before, grads = multi_tensor_slots(shapes, storage, rule)
    slots = [move_slot(slot) for slot in before]
    factor = None if multiplier is None else torch.tensor(multiplier, device=DEVICE)
    step(slots, [grad.to(DEVICE) for grad in grads], multiplier=factor, backend=backend)
    for old, slot, grad in zip(before, slots, grads, strict=True):
        want = kernel_cases.expected(old, grad.double(), multiplier)
        for name, tensor in slot.tensors():
            assert kernel_cases.stored_error(tensor, want[name]) <= 1.0, (slot.name, name)
        assert slot.norm_sq.item() == pytest.approx(grad.double().square().sum().item(), rel=1e-5)


def test_the_multi_tensor_step_of_tensors_that_do_not_lie_alike(backend):
    """A transposed weight, a gradient with other strides, an expanded gradient, and a weight with holes."""
    before, grads = multi_tensor_slots([(20, 30), (20, 30), (20, 30)], [STORAGE[0]] * 3)
    slots = [move_slot(slot) for slot in before]
    grads[1] = grads[1].t().contiguous().t()
    grads[2] = torch.randn(20, 1).expand(20, 30)
    holes = torch.full((20, 64), 7.0, device=DEVICE)
    holes[:, 3:33] = slots[2].weight
    slots[2] = dataclasses.replace(slots[2], weight=holes[:, 3:33])
    transposed = [tensor.t().contiguous().t() for _, tensor in slots[0].tensors()]
    slots[0] = dataclasses.replace(slots[0], weight=transposed[0], states=tuple(transposed[1:]))
    step(slots, [grad.to(DEVICE) for grad in grads], backend=backend)
    for old, slot, grad in zip(before, slots, grads, strict=True):
        want = kernel_cases.expected(old, grad.double(), None)
        for name, tensor in slot.tensors():
            assert kernel_cases.stored_error(tensor, want[name]) <= 1.0
    holes[:, 3:33] = 7.0
    assert (holes == 7.0).all()


def test_the_multi_tensor_step_keeps_coordinates_whose_gradient_is_not_finite(backend):
    before, grads = multi_tensor_slots([(100,), (37,)], [STORAGE[3], STORAGE[1]])
    clean = [move_slot(slot) for slot in before]
    step(clean, [grad.to(DEVICE) for grad in grads], backend=backend)
    for grad in grads:
        grad[5], grad[11] = math.nan, -math.inf
    slots = [move_slot(slot) for slot in before]
    step(slots, [grad.to(DEVICE) for grad in grads], backend=backend)
    for old, new, slot in zip(before, clean, slots, strict=True):
        for (_, a), (_, b), (_, got) in zip(old.tensors(), new.tensors(), slot.tensors(), strict=True):
            want = b.cpu().clone()
            want[5], want[11] = a[5], a[11]
            assert torch.equal(got.cpu(), want)


def test_every_weight_counts_its_own_steps(backend):
    """fp32 and bf16 weights in one call, the second with a gradient only on odd steps: as torch.optim.AdamW."""
    generator = torch.Generator().manual_seed(6)
    rule = get("adamw")
    group = rule.resolve({"lr": 1e-2})
    parameters = [torch.nn.Parameter(torch.randn(40, 30, generator=generator).bfloat16().float()) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    masters = [parameter.detach().clone().to(DEVICE) for parameter in parameters]
    weights = [masters[0], masters[1].bfloat16()]
    states = [tuple(torch.zeros(40, 30, device=DEVICE) for _ in rule.states) for _ in parameters]
    steps = [0, 0]
    for index in range(6):
        live = [0, 1] if index % 2 == 0 else [0]
        slots, grads = [], []
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(40, 30, generator=generator) if i in live else None
        for i in live:
            steps[i] += 1
            scalars = torch.tensor(rule.scalars(group, steps[i])).to(DEVICE)
            slots.append(Slot(rule, weights[i], states[i], scalars, master=masters[1] if i else None))
            grads.append(parameters[i].grad.to(DEVICE))
        step(slots, grads, backend=backend)
        optimizer.step()
    assert steps == [6, 3] == [int(optimizer.state[p]["step"]) for p in parameters]
    for parameter, master in zip(parameters, masters, strict=True):
        torch.testing.assert_close(master.cpu(), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_no_version_counter_moves(backend):
    slot, segments, accumulator, _ = kernel_cases.move(DEVICE, *kernel_cases.build(Case((33, 48), accumulator=FP32)))
    slot.weight.requires_grad_()
    written = [tensor for _, tensor in slot.tensors()] + [accumulator]
    versions = [tensor._version for tensor in written]
    before = slot.weight.detach().clone()
    wgrad_step(slot, segments, accumulator=accumulator, backend=backend)
    wgrad_accumulate(segments, accumulator, backend=backend)
    step([slot], [before], backend=backend)
    assert [tensor._version for tensor in written] == versions
    assert not torch.equal(slot.weight, before)


def refused(error, match, call):
    """``call(slot, segments)`` raises and leaves every byte of the slot."""
    built = kernel_cases.build(Case((33, 48), (17,), BF16, FP32, True))
    slot, segments, _, _ = kernel_cases.move(DEVICE, *built)
    with pytest.raises(error, match=match):
        call(slot, segments)
    for (_, a), (_, b) in zip(slot.tensors(), built[0].tensors(), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize(
    ("match", "segment"),
    [
        (r"layers\.0\.weight: dY and X make \[32, 48\], expected \[33, 48\]", ((5, 32), (5, 48))),
        (r"layers\.0\.weight: dY is \[5, 33\].* and X is \[6, 48\]", ((5, 33), (6, 48))),
        (r"layers\.0\.weight: dY is \[1, 5, 33\]", ((1, 5, 33), (1, 5, 48))),
    ],
)
def test_operands_that_do_not_fit_are_named(backend, match, segment):
    dy, x = (torch.zeros(shape, dtype=BF16, device=DEVICE) for shape in segment)
    refused(ValueError, match, lambda slot, segments: wgrad_step(slot, [*segments, (dy, x)], backend=backend))


def test_slots_that_do_not_fit_are_named(backend):
    def with_(**changes):
        return lambda slot, segments: wgrad_step(dataclasses.replace(slot, **changes), segments, backend=backend)

    def tensor(*shape, dtype=FP32):
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    refused(ValueError, r"exp_avg_sq is \[33, 47\]", with_(states=(tensor(33, 48), tensor(33, 47))))
    refused(ValueError, "got 1 tensors", with_(states=(tensor(33, 48),)))
    refused(TypeError, "the master is torch.bfloat16", with_(master=tensor(33, 48, dtype=BF16)))
    refused(ValueError, r"scalars is \[7\]", with_(scalars=tensor(7)))
    refused(ValueError, r"norm_sq is \[1\]", with_(norm_sq=tensor(1)))
    refused(TypeError, "state of dtype torch.float16", with_(states=(tensor(33, 48, dtype=FP16),) * 2))
    refused(TypeError, "float64 cannot be stepped", with_(weight=tensor(33, 48, dtype=torch.float64)))


def test_multipliers_and_accumulators_that_do_not_fit_are_named(backend):
    def call(**operands):
        return lambda slot, segments: wgrad_step(slot, segments, backend=backend, **operands)

    on = {"device": DEVICE}
    refused(ValueError, r"multiplier is \[1\]", call(multiplier=torch.ones(1, **on)))
    refused(ValueError, "multiplier is .* float64", call(multiplier=torch.ones((), dtype=torch.float64, **on)))
    refused(ValueError, r"the accumulator is \[48, 33\]", call(accumulator=torch.zeros(48, 33, **on)))
    refused(TypeError, "the accumulator is torch.float16", call(accumulator=torch.zeros(33, 48, dtype=FP16, **on)))


def test_a_multi_tensor_step_that_does_not_fit_changes_no_weight(backend):
    before, grads = multi_tensor_slots([(8,), (9,)], [STORAGE[0]] * 2)
    slots = [move_slot(slot) for slot in before]
    grads = [grads[0].to(DEVICE), torch.zeros(10, device=DEVICE)]
    with pytest.raises(ValueError, match=r"parameter 1: the gradient is \[10\]"):
        step(slots, grads, backend=backend)
    with pytest.raises(ValueError, match="2 slots and 1 gradients"):
        step(slots, grads[:1], backend=backend)
    for old, slot in zip(before, slots, strict=True):
        assert torch.equal(old.weight, slot.weight.cpu())


def test_backends_are_resolved_by_device_and_request(monkeypatch):
    assert resolve_backend("cpu") == "reference"
    assert resolve_backend("cuda") == "triton"
    assert resolve_backend("cuda", "reference") == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("cpu", "triton") == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r'backend="triton" cannot run on cpu.*TRITON_INTERPRET=1'):
        resolve_backend("cpu", "triton")
    with pytest.raises(NotImplementedError, match='backend="hopper" is not built'):
        resolve_backend("cuda", "hopper")
    with pytest.raises(ValueError, match="backend='cuda' is unknown; use one of: auto, triton, reference"):
        resolve_backend("cuda", "cuda")


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match='needs the package "triton"'):
        resolve_backend("cuda")
