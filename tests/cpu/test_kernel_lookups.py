"""Segments of token ids: an embedding's gradient beside, or in place of, that of a matrix product."""

import kernel_cases
import oracles
import pytest
import torch
import torch.nn.functional as F
from kernel_cases import BF16, DEVICE, FP16, FP32, Case

from forge_megatron.kernels import wgrad_accumulate, wgrad_norm_sq, wgrad_step

pytestmark = pytest.mark.parametrize("backend", kernel_cases.BACKENDS)

#: The first token count is of dY and X, the others are of ids: none, one, and more than one tile's step.
CASES = [
    Case((37, 20), (0, 0)),
    Case((37, 20), (0, 1)),
    Case((150, 70), (0, 90, 7)),
    Case((150, 70), (0, 90), BF16, BF16),
    Case((150, 70), (0, 33), FP16, FP32, True, multiplier=0.5),
    Case((150, 70), (17, 40, 9), BF16, FP32, accumulator=BF16),
    Case((37, 20), (5, 40), FP32, layout="strided"),
    Case((37, 20), (5, 40), rule="sgd"),
]


def build(case):
    """The slot, its segments, and the same segments with one-hot rows in place of ids."""
    built = slot, segments, accumulator, multiplier = kernel_cases.build(case)
    rows = case.shape[0]
    generator = torch.Generator().manual_seed(1)
    given, whole = segments[:1], segments[:1]
    for _, values in segments[1:]:
        ids = torch.randint(-1, rows // 2, values.shape[:1], generator=generator)
        ids[ids.numel() // 2 :] = 3
        ids[-1:] = rows - 1
        given.append((ids, values))
        whole.append((F.one_hot(ids.clamp(min=0), rows) * (ids >= 0)[:, None], values))
    return built, (slot, given, accumulator, multiplier), oracles.wgrad(whole, accumulator, case.shape)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_equals_fp64(backend, case):
    before, given, grad = build(case)
    slot, segments, accumulator, multiplier = kernel_cases.move(DEVICE, *given)
    with kernel_cases.poisoned_memory():
        wgrad_step(slot, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
    want = kernel_cases.expected(before[0], grad, case.multiplier)
    for name, tensor in slot.tensors():
        error = kernel_cases.stored_error(tensor, want[name], kernel_cases.sum_roundings(case))
        assert error <= 1.0, (name, error)
    assert slot.norm_sq.item() == pytest.approx(grad.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_the_norm_and_the_sum_equal_fp64(backend, case):
    _, given, grad = build(case)
    slot, segments, _, _ = kernel_cases.move(DEVICE, *given)
    out = torch.full((), torch.nan, device=DEVICE)
    wgrad_norm_sq(segments[1:], out, shape=slot.weight.shape, backend=backend)
    assert out.item() == pytest.approx(grad.square().sum().item(), rel=1e-5)
    total = torch.ones(case.shape, device=DEVICE)
    wgrad_accumulate(segments, total, backend=backend)
    oracles.assert_rounding(total, grad + 1, roundings=16)


def test_two_runs_have_the_same_bits(backend):
    case = Case((150, 70), (0, 200))
    runs = []
    for _ in range(2):
        slot, segments, _, _ = kernel_cases.move(DEVICE, *build(case)[1])
        wgrad_step(slot, segments, backend=backend)
        runs.append([tensor for _, tensor in slot.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_infinite_gradient_touches_its_own_coordinates_alone(backend, dtype):
    before, given, _ = build(Case((37, 20), (0, 12), dtype))
    ids, values = given[1][1]
    values[4, 7] = torch.inf
    hit = ids[4]
    slot, segments, _, _ = kernel_cases.move(DEVICE, *given)
    wgrad_step(slot, segments, backend=backend)
    kept = slot.states[1].cpu() == before[0].states[1]
    assert kept[hit, 7]
    assert kept.sum() == 1


def test_ids_without_a_shape_have_no_norm(backend):
    ids, values = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="ids do not tell how many rows the weight has"):
        wgrad_norm_sq([(ids, values)], torch.zeros((), device=DEVICE), backend=backend)


@pytest.mark.parametrize(
    ("ids", "values", "error"),
    [
        ((3, 1), (3, 20), "flatten them to"),
        ((4,), (3, 20), "flatten them to"),
        ((3,), (3, 19), "flatten them to"),
    ],
)
def test_ids_that_do_not_fit_are_refused(backend, ids, values, error):
    slot = build(Case((37, 20), (0, 1)))[1][0]
    before = slot.weight.clone()
    with pytest.raises(ValueError, match=f"layers.0.weight: ids are .*{error}"):
        wgrad_step(slot, [(torch.zeros(ids, dtype=torch.int64), torch.zeros(values))], backend=backend)
    assert torch.equal(slot.weight, before)
