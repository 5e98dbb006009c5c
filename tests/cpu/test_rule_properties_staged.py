"""What holds for every rule in stages, whatever the shapes and cuts; and what a step of one never makes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernel_regimes import RULES, copies, expect_near, factors, make, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from forge_megatron.kernels import step, wgrad_accumulate, wgrad_step
from forge_megatron.rules import get

few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(
    st.sampled_from(RULES),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 16),
    st.sets(st.integers(1, 15), max_size=3),
    st.integers(0, 3),
)
def test_any_chunking_of_the_tokens_gives_the_same_update(name, shape, tokens, cuts, seed):
    """The first chunk is summed before, as a micro-batch is; the others are segments."""
    dy, x = factors(shape, tokens, seed)
    edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    chunks = [(dy[slice(*ends)], x[slice(*ends)]) for ends in itertools.pairwise(edges)]
    whole, parts = make(name, shape, taken=3), make(name, shape, taken=3)
    accumulator = torch.zeros(shape)
    wgrad_accumulate(chunks[:1], accumulator, backend="reference")
    wgrad_step(whole, [(dy, x)], backend="reference")
    wgrad_step(parts, chunks[1:], accumulator=accumulator, backend="reference")
    if get(name).regime == "projected":
        expect_near(parts, whole)
    else:
        # G is the same number however it is summed, and everything after it is the same.
        assert all(map(torch.equal, tensors(parts), tensors(whole)))


#: State updates that are affine in G, so that a momentum may be summed over ranks in the gradient's place.
#: Of a projected rule it is so between two refreshes.
AFFINE = {("muon", "momentum_buffer"), ("scion", "d"), ("lamb", "exp_avg"), ("adam_mini", "exp_avg")}
AFFINE |= {(name, state) for name in ("galore", "apollo", "apollo_mini") for state in ("exp_avg", "projection")}


@pytest.mark.parametrize("name", RULES)
def test_which_states_are_affine_in_the_gradient(name):
    """``A(S, G1) + A(S, G2) - A(S, 0) = A(S, G1 + G2)`` (FORGE, proposition 2 iii), and not for the others."""
    shape = (18, 13)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    slots = []
    for grad in (first, second, torch.zeros(shape), first + second):
        slots.append(make(name, shape, taken=3))
        step([slots[-1]], [grad], backend="reference")
    rule = slots[0].rule
    names = [*rule.states, *rule.statistics(rule.resolve({"lr": 1.0}), torch.Size(shape))]
    for index, state in enumerate(names):
        one, two, none, both = ([*slot.states, *slot.statistics][index] for slot in slots)
        off = ((one + two - none - both).abs().max() / both.abs().max()).item()
        assert off < 1e-6 if (name, state) in AFFINE else off > 1e-3, (state, off)


class Made(TorchDispatchMode):
    """The storages of at least ``elements`` fp32 numbers that operations make; one that is freed may serve again."""

    def __init__(self, slot):
        super().__init__()
        self.elements = slot.weight.numel()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in tensors(slot)}
        self.places: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() >= 4 * self.elements:
            self.places |= {out.untyped_storage().data_ptr()} - self.known
        return out


@pytest.mark.parametrize("name", ["galore", "apollo", "apollo_mini"])
def test_a_low_rank_step_makes_nothing_of_the_gradients_size(name):
    """On Triton, whose kernels form a tile at a time; the projection is refreshed from the factors too."""
    slot = make(name, (90, 70))
    slot.rule = get(name).variant(get(name).resolve({"lr": 0.1, "rank": 3 if name != "apollo_mini" else 1}))
    before = copies(slot)
    with Made(slot) as made:
        wgrad_step(slot, [factors((90, 70), 5)], backend="triton")
    assert not made.places
    assert not torch.equal(slot.weight, before[0])


@pytest.mark.parametrize(("name", "most"), [("muon", 1), ("lamb", 1), ("lars", 1), ("adafactor", 2), ("sm3", 2)])
def test_a_step_in_stages_makes_one_layers_scratch_and_little_else(name, most):
    """Newton-Schulz iterates in bf16, in half of a scratch each, which is not counted."""
    slot = make(name, (90, 70))
    with Made(slot) as made:
        wgrad_step(slot, [factors((90, 70), 5)], backend="triton")
    assert 1 <= len(made.places) <= most
