"""A backward or a ``step()`` that is broken off: rolled back where updates wait, an error on the next use elsewhere."""

import copy
import gc
import weakref

import pytest
import torch

import forge_megatron as forge
from forge_megatron import kernels
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot

waiting_modes = pytest.mark.parametrize(
    "options",
    [{"skip": "atomic"}, {"clip": 0.1}, {"accumulation_steps": 2}],
    ids=["atomic", "clip", "accumulation"],
)
interrupts = pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])


def break_off(model, x, error):
    """A backward whose hook raises between the last two linears."""

    def hook(grad):
        raise error("on purpose")

    hidden = model[:-1](x)
    hidden.register_hook(hook)
    with pytest.raises(error, match="on purpose"):
        model[-1](hidden).square().mean().backward()


@backends
@waiting_modes
@interrupts
def test_restored_where_updates_wait(backend, options, error):  # field log row 139
    pair = Pair(mlp(6, 8, 8, 4), backend=backend, **options)
    micro_batches = options.get("accumulation_steps", 1)
    x = batch(5, 6)

    def window():
        for _ in range(micro_batches):
            pair.backward(mean_square(x))
        pair.close()

    window()
    before = snapshot(pair.model, pair.optimizer)
    for _ in range(micro_batches - 1):
        pair.model(x).square().mean().backward()
    kept = [weakref.ref(pair_of.x) for owned in pair.optimizer.owned.values() for pair_of in owned.factors.kept]
    break_off(pair.model, x, error)
    assert any(owned.factors for owned in pair.optimizer.owned.values()) or micro_batches == 1
    assert pair.optimizer.rollback()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert not any(owned.factors for owned in pair.optimizer.owned.values())
    assert all(p.grad is None for p in pair.model.parameters())
    gc.collect()
    assert not [reference for reference in kept if reference() is not None and reference() is not x]
    window()
    pair.expect_equal()


@backends
@interrupts
def test_an_error_on_the_next_use_where_weights_were_updated(backend, error):  # field log row 139
    model = mlp(6, 8, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    x = batch(5, 6)
    break_off(model, x, error)
    message = r"failed after it had updated 1 of 3 weights \(the first is 4\.weight\); load a checkpoint.*accept=True"
    assert not optimizer.rollback()
    assert all(p.grad is None for p in model.parameters())
    for use in (optimizer.step, optimizer.state_dict, lambda: model(x).sum().backward()):
        with pytest.raises(RuntimeError, match=message):
            use()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model(x).square().mean().backward()
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [1] * 6


@backends
def test_a_half_step_can_be_accepted(backend):
    """The last linear keeps its update, as a step of its own; the others were never stepped."""
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    break_off(pair.model, x, KeyboardInterrupt)
    assert pair.optimizer.rollback(accept=True)
    pair.twin(x).square().mean().backward()
    for p in (pair.twin[0].weight, pair.twin[0].bias, pair.twin[2].bias):
        p.grad = None
    pair.oracle.step()
    pair.oracle.zero_grad()
    pair.expect_equal()
    pair.train(mean_square(x))
    pair.expect_equal()


def test_a_completed_backward_cannot_be_taken_back_in_immediate_mode():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    model(batch(5, 6)).square().mean().backward()
    message = r"rolled back after backward had updated 2 of 2 weights \(the first is 0\.weight\)"
    assert not optimizer.rollback()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"skip": "atomic"}], ids=["immediate", "atomic"])
def test_nothing_to_roll_back(options):
    """After an interrupt in forward, or before the first linear's backward, immediate mode is as it was too."""
    pair = Pair(mlp(6, 8, 4), **options)
    pair.optimizer.rollback()
    out = pair.model(batch(5, 6))
    out.register_hook(lambda grad: (_ for _ in ()).throw(KeyboardInterrupt("on purpose")))
    with pytest.raises(KeyboardInterrupt):
        out.square().mean().backward()
    pair.optimizer.rollback()
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_rollback_inside_backward_is_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    hidden = model[0](batch(5, 6))
    hidden.register_hook(lambda grad: optimizer.rollback())
    with pytest.raises(RuntimeError, match="called inside backward"):
        model[2](hidden).square().mean().backward()


def test_a_step_that_is_interrupted_is_not_repeated(monkeypatch):
    """It may have stepped a part of the weights: a second step() would step those twice."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    model(batch(5, 6)).square().mean().backward()
    with monkeypatch.context() as patch:
        step = kernels.wgrad_steps

        def interrupted(slots, *args, **kwargs):
            if slots[0].name == "2.weight":
                raise KeyboardInterrupt
            step(slots, *args, **kwargs)

        patch.setattr(kernels, "wgrad_steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    before = snapshot(model, optimizer)
    message = r"the last step\(\) was interrupted by KeyboardInterrupt while it changed weights"
    assert not optimizer.rollback()
    for use in (optimizer.step, lambda: model(batch(5, 6)).sum().backward()):
        with pytest.raises(RuntimeError, match=message):
            use()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    optimizer.rollback(accept=True)
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    steps = {optimizer.names[p]: int(state["step"]) for p, state in optimizer.state.items()}
    assert steps == {"0.weight": 2, "0.bias": 2, "2.weight": 1, "2.bias": 2}


def test_a_schedule_that_moved_after_a_discarded_window_is_followed():
    """The scalars of the window that was discarded are not those of the next."""
    pair = Pair(mlp(6, 8, 4))
    out = pair.model[0](batch(5, 6))
    hidden = torch.tanh(out)
    hidden.register_hook(lambda grad: (_ for _ in ()).throw(ArithmeticError))
    with pytest.raises(ArithmeticError):
        hidden.sum().backward()
    pair.optimizer.rollback()
    for _, optimizer in pair.sides():
        optimizer.param_groups[0]["lr"] = 1e-4
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_a_failed_backward_names_a_sum_that_it_had_added_to():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=2)
    x = batch(400, 6)

    def fail(grad):
        raise torch.OutOfMemoryError("in backward")

    hidden = model[1](model[0](x))
    hidden.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model[2](hidden).square().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"backward failed \(2\.weight had already been accumulated\); call zero_grad"
    ):
        optimizer.step()
    assert optimizer.rollback()


@pytest.mark.parametrize("discard", ["rollback", "zero_grad", "load_state_dict"])
def test_a_discarded_window_does_not_say_how_long_the_next_is(discard):
    """Two micro-batches take more than their sum, which the first becomes if the window before has shown that."""

    def window(model, optimizer):
        summed = []
        for seed in range(2):
            model(batch(3, 8, seed=seed)).square().mean().backward()
            summed += [next(iter(optimizer.owned.values())).factors.accumulator is not None]
        optimizer.step()
        optimizer.zero_grad()
        return summed

    model = mlp(8, 8, bias=False)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=None)
    assert window(model, optimizer) == [False, True]
    saved = copy.deepcopy(optimizer.state_dict())
    model(batch(3, 8)).square().mean().backward()
    getattr(optimizer, discard)(*([saved] if discard == "load_state_dict" else []))
    assert window(model, optimizer) == [True, True]
