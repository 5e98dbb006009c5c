"""What holds for every rule of regime 1, whatever the shapes, cuts and hyperparameters."""

import dataclasses
import itertools

import kernel_cases
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import FP32, Case

from forge_megatron.kernels import wgrad_accumulate, wgrad_step
from forge_megatron.rules import bind, get, torch_language

FORMS = sorted(oracles.FORMS)
few = settings(max_examples=60, deadline=None, derandomize=True)


def cuts(extent):
    """Increasing places at which an axis is cut, its ends among them."""
    return st.sets(st.integers(1, extent), max_size=4).map(lambda places: sorted({0, extent, *places}))


@st.composite
def partitions(draw):
    rows, columns, tokens = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 24))
    return (rows, columns, tokens), draw(cuts(rows)), draw(cuts(columns)), draw(cuts(tokens))


@few
@given(st.sampled_from(FORMS), partitions(), st.integers(0, 3))
def test_any_partition_of_weight_and_tokens_gives_the_same_update(form, partition, seed):
    """Factors are small multiples of 1/4, so that a gradient is the same number in whatever order it is summed."""
    (rows, columns, tokens), row_cuts, column_cuts, token_cuts = partition
    whole, _, _, _ = kernel_cases.build(Case((rows, columns), (), rule=form), seed)
    generator = torch.Generator().manual_seed(seed)
    dy, x = (torch.randint(-8, 9, (tokens, n), generator=generator) / 4 for n in (rows, columns))
    parts = dataclasses.replace(
        whole, weight=whole.weight.clone(), states=tuple(state.clone() for state in whole.states), norm_sq=None
    )
    wgrad_step(whole, [(dy, x)], backend="reference")
    # The first chunk of tokens is summed before, as a micro-batch is; the others are segments.
    chunks = [slice(*ends) for ends in itertools.pairwise(token_cuts)]
    for row in (slice(*ends) for ends in itertools.pairwise(row_cuts)):
        for column in (slice(*ends) for ends in itertools.pairwise(column_cuts)):
            tile = dataclasses.replace(
                parts, weight=parts.weight[row, column], states=tuple(state[row, column] for state in parts.states)
            )
            segments = [(dy[chunk, row], x[chunk, column]) for chunk in chunks]
            accumulator = torch.zeros(tile.weight.shape)
            wgrad_accumulate(segments[:1], accumulator, backend="reference")
            wgrad_step(tile, segments[1:], accumulator=accumulator, backend="reference")
    for (name, want), (_, got) in zip(whole.tensors(), parts.tensors(), strict=True):
        oracles.assert_rounding(got, want, 2), name


@few
@given(
    st.sampled_from(FORMS),
    st.floats(1e-4, 0.5),
    st.floats(0.0, 0.5),
    st.tuples(st.floats(0.0, 0.95), st.floats(0.5, 0.999)),
    st.floats(1e-8, 1e-2),
    st.booleans(),
    st.integers(1, 200),
)
def test_one_update_from_any_state_equals_fp64(form, lr, weight_decay, betas, eps, maximize, step):
    rule = get(form.partition("-")[0])
    given_to_all = {"weight_decay": weight_decay, "betas": betas, "eps": eps, "maximize": maximize}
    hyperparameters = {name: value for name, value in given_to_all.items() if name in rule.defaults}
    hyperparameters = {"lr": lr, **oracles.FORMS[form], **hyperparameters}
    group = rule.resolve(hyperparameters)
    variant = rule.variant(group)
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(7, 9, generator=generator)
    # A first step reads no state but that of a beginning.
    initial = {} if variant.initial is None else variant.initial(group)
    states = tuple(
        kernel_cases.random_state(generator, name, (7, 9)) if step > 1 else torch.full((7, 9), initial.get(name, 0.0))
        for name in variant.states
    )
    grad = torch.randn(7, 9, generator=generator)
    running = tuple(variant.running.values())
    for earlier in range(1, step if running else 1):
        running = variant.advance(group, earlier, *running)
    h = torch.tensor(variant.scalars(group, step, *running), dtype=FP32).unbind()
    got, new = bind(variant.update, torch_language)(grad, weight, states, h)

    oracle = oracles.Torch64(oracles.OPTIMIZERS[rule.name], **hyperparameters)
    before = dict(zip(variant.states, states, strict=True))
    want, expected = oracle.step(weight, tuple(before[name] for name in oracle.states), grad, step)
    # The variance of the centered form is a difference, which has that many bits fewer.
    slack = 16 if "centered" in oracles.FORMS[form] else 1
    oracles.assert_rounding(got, want, 8 * slack)
    for name, value in zip(variant.states, new, strict=True):
        oracles.assert_rounding(value, dict(zip(oracle.states, expected, strict=True))[name], 4 * slack)


def exact_update(form):
    """``(w, states, g) -> (w, states)`` of a later step in fp64, where what is affine is so to the last bits."""
    rule, h = kernel_cases.rule_and_scalars(form)
    update = bind(rule.update, torch_language)
    return rule, lambda w, states, g: update(g, w, states, h.double().unbind())


def is_affine(form, generator) -> bool:
    """Whether the new state of a mixture of gradients is the mixture of the new states."""
    rule, update = exact_update(form)
    w, g1, g2 = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    states = tuple(kernel_cases.random_state(generator, name, 50).double() for name in rule.states)
    mixed, first, second = (update(w, states, g)[1] for g in (0.3 * g1 + 0.7 * g2, g1, g2))
    return all(
        torch.allclose(m, 0.3 * a + 0.7 * b, rtol=1e-12, atol=1e-12)
        for m, a, b in zip(mixed, first, second, strict=True)
    )


AFFINE = {"sgd", "momentum", "momentum-nesterov", "lion"}


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_affine_in_the_gradient_for_these_rules_and_no_others(form):
    assert is_affine(form, torch.Generator().manual_seed(0)) is (form in AFFINE)


@pytest.mark.parametrize(("form", "reducible"), [("momentum", True), ("momentum-nesterov", False), ("lion", False)])
def test_the_weight_reads_the_state_alone(form, reducible):
    """Two gradients and two states that make one new state: the same weight, if the update reads nothing else.

    Only then may data-parallel ranks reduce the state in the gradient's place (DESIGN section 1).
    """
    _, update = exact_update(form)
    generator = torch.Generator().manual_seed(0)
    w, state, g, shift = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    nothing = torch.zeros_like(w)
    constant = update(w, (nothing,), nothing)[1][0]
    of_state = update(w, (nothing + 1.0,), nothing)[1][0] - constant
    of_gradient = update(w, (nothing,), nothing + 1.0)[1][0] - constant
    first_w, (first,) = update(w, (state,), g)
    second_w, (second,) = update(w, (state - shift * of_gradient / of_state,), g + shift)
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
    assert torch.allclose(first_w, second_w, rtol=1e-10, atol=1e-10) is reducible
