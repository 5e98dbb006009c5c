"""What a window keeps: factors or one fp32 gradient a weight, whichever is smaller, and never both."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mean_square, mlp


@pytest.mark.parametrize("declared", [40, None])
@pytest.mark.parametrize("tokens", [1, 2, 24, 64])
def test_what_waits_takes_its_factors_or_one_fp32_gradient_whichever_is_smaller(tokens, declared):
    model = mlp(64, 64, 64, bias=False)
    optimizer = forge.attach(model, lr=1e-3, accumulation_steps=declared)
    gradient, pair = 4 * 64 * 64, 4 * tokens * (64 + 64)
    for window in range(2):
        held = []
        for seed in range(40):
            model(batch(tokens, 64, seed=seed)).square().sum().backward()
            held += [owned.factors.nbytes() for owned in optimizer.owned.values()]
        assert max(held) == min(40 * pair, gradient), window
        for row in optimizer.coverage:
            assert row.waits_as == ("factors" if 40 * pair <= gradient else "accumulator")
            # Until the kernel that sums them has run: the first micro-batch's, or a window's of unknown length.
            assert row.waiting_bytes <= gradient + (pair if declared else gradient)
        optimizer.step()
        optimizer.zero_grad()


def peak(window: Callable[[], object]) -> int:
    """The most bytes that the allocator has given out and not got back, above those at the beginning."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        window()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("tokens", [16, 100])
def test_the_peak_of_a_window_is_a_steps_and_what_is_kept_at_most_one_gradient(tokens, clip):
    """Of every allocation, beside a step of one micro-batch."""

    def window(micro_batches, **options):
        model = mlp(*[256] * 5, bias=False)
        optimizer = forge.attach(model, lr=1e-3, **options)
        batches = [batch(tokens, 256, seed=seed) for seed in range(micro_batches)]

        def run():
            for x in batches:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run()
        return peak(run)

    gradients, kept = 4 * 4 * 256 * 256, 6 * 4 * 4 * tokens * 512
    grown = window(6, accumulation_steps=6, clip_grad_norm=clip) - window(1, clip_grad_norm=clip)
    # And what the allocator rounds up, and scalars.
    assert grown <= min(gradients, kept) + 4096, grown / gradients


@backends
def test_factors_that_were_summed_equal_factors_that_were_kept(backend):
    """Tokens of 4 + 3 features outgrow a gradient of 12 in the second micro-batch."""
    pair = Pair(mlp(4, 3), backend=backend, accumulation_steps=None)
    factors = pair.optimizer.owned[pair.model[0].weight].factors
    for window in range(2):
        for micro in range(5):
            pair.backward(mean_square(batch(1 + micro, 4, seed=micro)))
            # Once a window's length is known, nothing is kept beside the sum.
            assert len(factors.kept) == (micro == window == 0)
        assert factors.accumulator is not None
        pair.close()
    pair.expect_equal()


def test_what_several_weights_keep_is_counted_once():
    """Narrow keys and values beside a wide query: with an X of its own each would be summed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": nn.Linear(64, 64), **{name: nn.Linear(64, 16, bias=False) for name in "qkv"}})
    pair = Pair(model, accumulation_steps=4)

    def loss(side, x):
        hidden = torch.tanh(side["inner"](x))
        return sum(side[name](hidden).square().sum() for name in "qkv")

    for micro in range(4):
        pair.backward(partial(loss, x=batch(5, 64, seed=micro)))
    owned = {name: pair.optimizer.owned[model[name].weight].factors for name in "qkv"}
    assert 4 * 5 * (64 + 16) * 4 > 16 * 64 * 4 > 4 * 5 * (64 / 3 + 16) * 4
    assert all(factors.accumulator is None for factors in owned.values())
    # Of the last micro-batch nothing is to be foreseen any more.
    counted = sum(kept.nbytes for factors in owned.values() for kept in factors.kept[:3])
    assert abs(counted - 3 * 4 * 5 * (64 + 3 * 16)) <= 9
    pair.close()
    pair.expect_equal(atol=1e-5)


@backends
def test_uses_that_outgrow_the_gradient_in_one_backward_are_summed_up(backend):
    """A weight that is used nine times waits for its last use, and is stepped there."""
    pair = Pair(mlp(6, 6), backend=backend)

    def loss(model):
        h = batch(2, 6)
        for _ in range(9):
            h = torch.tanh(model(h))
        return h.square().sum()

    for _ in range(2):
        pair.backward(loss)
        owned = pair.optimizer.owned[pair.model[0].weight]
        assert owned.updated
        assert owned.factors.waited_as == "accumulator"
        pair.close()
    pair.expect_equal()
