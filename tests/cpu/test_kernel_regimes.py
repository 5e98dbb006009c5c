"""Rules in stages on both backends, from a gradient's factors: as from the gradient itself, and what is left alone."""

import math

import oracles
import pytest
import torch

from forge_megatron.kernels import Slot, stacks, step, wgrad_step, wgrad_steps
from forge_megatron.rules import get

BACKENDS = ("reference", "triton")
RULES = ["adafactor", "adalomo", "adam_mini", "apollo", "apollo_mini", "galore", "lamb", "lars", "muon", "scion", "sm3"]
OPTIONS = {"apollo": {"rank": 3}, "galore": {"rank": 3, "proj": "svd"}, "sm3": {"momentum": 0.5}}
SHAPES = [(18, 13), (13, 18)]


def make(name, shape, *, dtype=torch.float32, state=torch.float32, master=False, taken=0) -> Slot:
    """A slot that has been stepped ``taken`` times, its states not zero."""
    generator = torch.Generator().manual_seed(4)
    shape = torch.Size(shape)
    rule = get(name)
    group = rule.resolve({"lr": 0.1, **OPTIONS.get(name, {})})
    rule = rule.variant(group)
    weight = torch.randn(shape, generator=generator)
    states = tuple(torch.rand(shape, generator=generator).to(state) for _ in rule.states)
    shapes = rule.statistics(group, shape).values()
    return Slot(
        rule,
        weight.to(dtype),
        states,
        torch.tensor(rule.scalars(group, taken + 1)),
        master=weight.clone() if master else None,
        norm_sq=torch.zeros(()),
        statistics=tuple(torch.rand(shape, generator=generator) for shape in shapes),
        step=torch.tensor(float(taken)),
    )


def tensors(slot: Slot) -> list[torch.Tensor]:
    return [*(tensor for _, tensor in slot.tensors()), *slot.statistics]


def copies(slot: Slot) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors(slot)]


def factors(shape, tokens: int, seed: int = 0):
    """Small whole numbers: every sum of their products is exact, in any order, and so is G."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    draw = lambda extent: torch.randint(-3, 4, (tokens, extent), generator=generator).float()  # noqa: E731
    return draw(rows), draw(columns)


def expect_near(got: Slot, want: Slot):
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        # Newton-Schulz iterates in bf16, where an input of another last bit may round the other way.
        if got.rule.name in ("muon", "scion") and ours is got.weight:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1 * 1.5 * torch.finfo(torch.bfloat16).eps)
        else:
            oracles.assert_rounding(ours, theirs, 16)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RULES)
def test_factors_of_several_uses_and_an_accumulator_step_like_their_gradient(name, backend):
    for shape, taken in zip(SHAPES, (0, 3), strict=True):
        segments = [factors(shape, 7), factors(shape, 0), factors(shape, 5, seed=1)]
        accumulator = torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(2)).float()
        multiplier = torch.tensor(0.25)
        slot, twin = make(name, shape, taken=taken), make(name, shape, taken=taken)
        wgrad_step(slot, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
        grad = sum(dy.t() @ x for dy, x in segments) + accumulator
        step([twin], [grad], multiplier=multiplier, backend="reference")
        expect_near(slot, twin)
        assert not torch.equal(slot.weight, make(name, shape, taken=taken).weight)
        # Before the multiplier, as for every rule.
        assert slot.norm_sq.item() == twin.norm_sq.item() == grad.square().sum().item()


@pytest.mark.parametrize("name", RULES)
def test_a_master_is_stepped_in_fp32_and_the_weight_is_its_rounding(name):
    slot, twin = make(name, (18, 13), dtype=torch.bfloat16, master=True), make(name, (18, 13))
    segments = [factors((18, 13), 7)]
    for each in (slot, twin):
        wgrad_step(each, segments, backend="reference")
    assert torch.equal(slot.master, twin.weight)
    assert torch.equal(slot.weight, slot.master.bfloat16())


@pytest.mark.parametrize("name", [name for name in RULES if get(name).states])
def test_states_in_bf16_are_roundings(name):
    slot, twin = make(name, (18, 13), state=torch.bfloat16), make(name, (18, 13))
    for state, half in zip(twin.states, slot.states, strict=True):
        state.copy_(half)
    for each in (slot, twin):
        wgrad_step(each, [factors((18, 13), 7)], backend="reference")
    for state, half in zip(twin.states, slot.states, strict=True):
        assert torch.equal(half, state.bfloat16())


NOT_FINITE = [(math.nan, None), (math.inf, None), (math.inf, 0.0)]
#: A finite gradient whose square is none, which these rules measure.
MEASURED = ("adafactor", "adalomo", "adam_mini", "lars", "sm3")


@pytest.mark.parametrize(
    ("name", "value", "clipped", "backend"),
    [
        *((name, value, clipped, "reference") for name in RULES for value, clipped in NOT_FINITE),
        *((name, math.nan, None, "triton") for name in RULES),
        *((name, 1e25, None, "reference") for name in MEASURED),
    ],
)
def test_a_gradient_that_is_not_finite_leaves_the_whole_matrix_alone(name, value, clipped, backend):
    """What is a function of its own coordinate alone is left alone there alone: a momentum, a sign.

    In the step in which projections would be refreshed, and with the coefficient that such a norm has.
    """
    slot = make(name, (18, 13), taken=200)
    before = copies(slot)
    grad = torch.ones(18, 13)
    grad[4, 5] = value
    multiplier = None if clipped is None else torch.tensor(clipped)
    wgrad_step(slot, [], accumulator=grad, multiplier=multiplier, backend=backend)
    assert torch.equal(slot.weight, before[0])
    for statistic, old in zip(slot.statistics, before[1 + len(slot.states) :], strict=True):
        assert torch.equal(statistic, old)
    for state, old in zip(slot.states, before[1:], strict=False):
        assert state[4, 5] == old[4, 5]
        assert state.isfinite().all()
    assert not slot.norm_sq.isfinite()


@pytest.mark.parametrize("name", RULES)
def test_no_token_is_a_gradient_of_zero(name):
    """DESIGN rule 6: a momentum decays and a weight is decayed where nothing arrives."""
    slot, twin = make(name, (18, 13), taken=3), make(name, (18, 13), taken=3)
    wgrad_step(slot, [], backend="reference")
    step([twin], [torch.zeros(18, 13)], backend="reference")
    expect_near(slot, twin)
    assert all(tensor.isfinite().all() for tensor in tensors(slot))


@pytest.mark.parametrize("name", ["apollo", "galore", "lars"])
def test_the_ids_of_an_embedding_stand_for_one_hot_rows(name):
    ids, x = torch.tensor([3, 17, 3, 99, 0, 3]), factors((18, 13), 6)[1]
    one_hot = torch.nn.functional.one_hot(ids.clamp(max=18), 19)[:, :18].float()
    slot, twin = make(name, (18, 13), taken=3), make(name, (18, 13), taken=3)
    wgrad_step(slot, [(ids, x)], backend="reference")
    wgrad_step(twin, [(one_hot, x)], backend="reference")
    expect_near(slot, twin)


def test_matrices_of_one_shape_share_newton_schulz(monkeypatch):
    """Stacked up to a bound of the memory that their scratches take together."""
    from forge_megatron.kernels import staged
    from forge_megatron.rules.split import muon

    sizes = []
    kernel = muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", lambda u, *rest: sizes.append(tuple(u.shape)) or kernel(u, *rest))
    monkeypatch.setattr(staged, "STACK_ELEMENTS", 3 * 18 * 13)
    slots = [make("muon", shape) for shape in [(18, 13)] * 4 + [(13, 18)]]
    # Not all alike, so that one in another's place would be seen.
    grads = [torch.randn(slot.weight.shape, generator=torch.Generator().manual_seed(i)) for i, slot in enumerate(slots)]
    step(slots, grads, backend="reference")
    assert sizes == [(3, 18, 13), (18, 13), (13, 18)]
    twins = [make("muon", slot.weight.shape) for slot in slots]
    for twin, grad in zip(twins, grads, strict=True):
        step([twin], [grad], backend="reference")
    for slot, twin in zip(slots, twins, strict=True):
        expect_near(slot, twin)

    # From factors too, as at step() where the updates waited for it; whole numbers, so that G is exact.
    waiting, alone = ([make(name, (18, 13)) for name in ("muon", "lamb", "muon")] for _ in range(2))
    segments = [[factors((18, 13), 7, seed=seed)] for seed in range(3)]
    assert list(stacks(waiting)) == [[0, 2], [1]]
    for indices in stacks(waiting):
        wgrad_steps(
            [waiting[index] for index in indices],
            [segments[index] for index in indices],
            accumulators=[None] * len(indices),
            multipliers=[torch.tensor(0.5)] * len(indices),
        )
    for slot, factor in zip(alone, segments, strict=True):
        wgrad_step(slot, factor, multiplier=torch.tensor(0.5))
    assert sizes[8:] == [(2, 18, 13), (18, 13), (18, 13)]
    for slot, twin in zip(waiting, alone, strict=True):
        expect_near(slot, twin)
