"""What is measured of a gradient, while it is formed and from memory: against fp64, and by how many walks over it."""

import contextlib
import math
from types import SimpleNamespace

import oracles
import pytest
import torch
from test_kernel_regimes import copies, factors, make, tensors
from test_rule_properties_staged import Made

from forge_megatron.formats import scale_name, state_format
from forge_megatron.kernels import (
    Slot,
    fused,
    prepared,
    staged,
    step,
    triton_launch,
    triton_measure,
    triton_wgrad,
    wgrad_step,
)
from forge_megatron.kernels.measured import Reading
from forge_megatron.kernels.tiles import Tile

#: Two parts of a tile; several tiles each way, the last of each not full.
TILE = Tile(16, 32, 16, group=2, parts=2, num_warps=4, num_stages=2)
SHAPE = (37, 75)

#: Launches of a step: how often the gradient is walked over to measure it, the first time while it is formed.
MEASURES = {"adam_mini": 1, "adafactor": 2, "adalomo": 2, "lamb": 1, "lars": 1, "sm3": 1}


def values(g, w, h):
    return g * h[0] + w * w, g * g + h[1] * h[1] * h[2]


def reading(weight, given, largest=False, over=((0, (1,)), (1, (0,)), (1, (0, 1)), (0, (0, 1)))) -> Reading:
    counts = [math.prod(SHAPE[dim] for dim in dims) for _, dims in over]
    shares = tuple(1.0 if largest else 1.0 / count for count in counts)
    norm_sq = torch.zeros(())
    return Reading(values, largest, over, shares, weight.shape, weight, torch.tensor([0.5]), given, norm_sq)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("formed", [False, True])
def test_numbers_equal_fp64_and_the_gradient_is_written(formed, largest, backend, monkeypatch):
    monkeypatch.setattr(triton_launch, "choose_tile", lambda *sizes, **kind: TILE)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(SHAPE, generator=generator)
    given = [torch.rand(37, 1, generator=generator), torch.rand(1, 75, generator=generator)]
    segments = [factors(SHAPE, 7), factors(SHAPE, 20, seed=1)]
    grad = sum(dy.t() @ x for dy, x in segments) + 1.0
    read = reading(weight, given, largest)
    out = torch.full(SHAPE, math.nan) if formed else None
    of = (segments, torch.ones(SHAPE)) if formed else ((), grad)
    numbers = fused.measure(read, *of, torch.tensor(0.25), out, backend)
    assert out is None or torch.equal(out, grad)
    g, h = grad.double() * 0.25, [each.double() for each in (torch.tensor(0.5), *given)]
    exact = values(g, weight.double(), h)
    for (index, dims), number in zip(read.over, numbers, strict=True):
        # Their maxima are above 0, as those of what is not negative are.
        want = exact[index].amax(dims, keepdim=True) if largest else exact[index].mean(dims, keepdim=True)
        assert number.shape == want.shape
        oracles.assert_rounding(number, want, 8)
    assert read.norm_sq.item() == grad.square().sum().item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("largest", [False, True])
def test_a_number_of_what_is_not_finite_is_not(largest, backend, value):
    grad = torch.zeros(SHAPE)
    grad[20, 70] = value
    read = reading(torch.zeros(SHAPE), [torch.ones(37, 1), torch.ones(1, 75)], largest)
    rows, columns, *whole = fused.measure(read, (), grad, None, None, backend)
    assert rows.isfinite().sum() == 36
    assert not rows[20].isfinite()
    assert columns.isfinite().sum() == 74
    assert not columns[0, 70].isfinite()
    assert not any(number.isfinite() for number in whole)


class Counted:
    """A kernel, and how often it was launched."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize("name", MEASURES)
def test_a_step_walks_over_the_gradient_as_often_as_its_rule_measures_and_once_to_step(name, monkeypatch):
    slot = make(name, (90, 70))
    measure, apply = Counted(triton_measure.wgrad_measure_kernel), Counted(triton_wgrad.wgrad_step_kernel)
    monkeypatch.setattr(triton_measure, "wgrad_measure_kernel", measure)
    for module in (triton_wgrad, triton_measure):
        monkeypatch.setattr(module, "wgrad_step_kernel", apply)
    before = copies(slot)
    with Made(slot) as made:
        wgrad_step(slot, [factors((90, 70), 5)], backend="triton")
    assert measure.launches == MEASURES[name]
    # LAMB's states are updated in the tile that forms the gradient.
    assert apply.launches == (2 if name == "lamb" else 1)
    assert len(made.places) == 1
    assert not torch.equal(slot.weight, before[0])


@pytest.mark.parametrize("name", ["adafactor", "adalomo", "lars", "sm3"])
def test_a_vector_is_a_row_of_a_matrix_to_the_kernels(name):
    slot, twin = make(name, (70,), taken=3), make(name, (70,), taken=3)
    grad = factors((1, 70), 5)[1].sum(0)
    for each, backend in ((slot, "triton"), (twin, "reference")):
        step([each], [grad], backend=backend)
    for got, want in zip(tensors(slot), tensors(twin), strict=True):
        oracles.assert_rounding(got, want, 8)
    assert slot.norm_sq.item() == twin.norm_sq.item() == grad.square().sum().item()


class Compiled:
    """A compiled kernel of Triton 3.6, as far as a launch past its converter asks."""

    def __init__(self):
        launch = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, launch=self.launch)
        self.run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False, **vars(launch))
        self.function, self.packed_metadata, self.arguments = 1, (), None

    def launch(self, *arguments):
        self.arguments = list(arguments[-5:])

    def __getitem__(self, grid):
        return self.launch


@pytest.mark.parametrize("version", [(3, 6), (3, 9)])
def test_a_launch_that_is_remembered_has_every_operand_in_its_place(version, monkeypatch):
    device = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(prepared, "driver", SimpleNamespace(active=device))
    monkeypatch.setattr(prepared, "triton_version", lambda: version)
    stays, *first, scratch, factor, multiplier = (torch.zeros(4) for _ in range(6))
    compiled = Compiled()
    again = prepared.prepare(compiled, (1, 1, 1), [stays, first[0], None, (first[1],), 7], [3, 1])
    again((factor, multiplier), scratch)
    given = [stays, scratch, None, (factor, multiplier), 7]
    assert compiled.arguments == (prepared._pointers(given) if version == (3, 6) else given)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ["lamb", "muon", "scion"])
def test_what_a_scratch_held_before_is_never_read(name, backend, monkeypatch):
    """States in blocks: one whose gradient is not finite is left alone, and the direction that is not there is NaN."""
    made = staged._scratch

    @contextlib.contextmanager
    def found(*given):
        with made(*given) as (scratch, whole):
            yield scratch.fill_(1.0), whole

    monkeypatch.setattr(staged, "_scratch", found)
    int8, slot = state_format("int8"), make(name, (18, 70))
    kept = {}
    for each in slot.rule.states:
        kept |= int8.allocate(each, slot.weight, nonnegative=each in slot.rule.nonnegative)
    slot.states = tuple(kept[each] for each in slot.rule.states)
    slot.scales = tuple(kept[scale_name(each)] for each in slot.rule.states)
    before = copies(slot)
    grad = torch.ones(18, 70)
    grad[4, 5] = math.inf
    wgrad_step(slot, [], accumulator=grad, backend=backend)
    assert torch.equal(slot.weight, before[0])
    for state in slot.states:
        assert not state[4, :64].any()
        assert state[4, 64:].all()
        assert state[5].all()


def test_a_coordinate_whose_step_is_not_finite_is_left_alone():
    """SM3 without eps divides 0 by 0 where no gradient has ever been."""
    for backend in ("reference", "triton"):
        slot: Slot = make("sm3", (18, 13))
        slot.scalars[2] = 0.0
        for accumulator in slot.statistics:
            accumulator.zero_()
        before = copies(slot)
        grad = torch.ones(18, 13)
        grad[4, 5] = 0.0
        step([slot], [grad], backend=backend)
        moved = slot.weight != before[0]
        assert moved.sum() == 18 * 13 - 1
        assert not moved[4, 5]
