"""A captured step over data-parallel ranks: on the CPU a stand-in replays the device's part, the hosts' is real."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forge_megatron as forge
from forge_megatron import capture
from tests.cpu import replayer
from tests.distributed.captured_ranks import ARMS, expect_equal_steps, train
from tests.distributed.ranks import Workers
from tests.distributed.twins import Model, ids

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def installed():
    """Every optimizer that is asked to capture gets the stand-in."""
    capture.Capturing.capture = replayer.capturing


@workers
def bits():
    installed()
    for name in ARMS:
        expect_equal_steps(train(name, captured=True), train(name, captured=False))


def test_captured_steps_have_the_bits_of_eager_ones(results):  # field log row 80
    """Schedules, norms, sharded states, codes and random bits, with another batch on every rank."""
    results["bits"]


def step_of(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def attached(**options):
    installed()
    model = Model()
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, **options)
    return model, optimizer, lambda batch: step_of(model, optimizer, batch)


@workers
def other_shapes():
    """One rank's batch has another shape, which it has to run and to record: so do all."""
    model, optimizer, step = attached()
    reference, _plain, eager = attached()
    captured = optimizer.capture(step, warmup=1)
    recorded = []
    for number in range(9):
        rows = 2 if dist.get_rank() == 1 and number in (3, 4, 5) else 3
        captured(ids(number)[:rows])
        eager(ids(number)[:rows])
        recorded.append(optimizer._graphs.recorded)
        assert all(map(torch.equal, model.parameters(), reference.parameters())), number
    # Run, recorded, replayed; one runs and all do; both record; and replay from there on.
    assert recorded == [0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_ranks_run_record_and_replay_together(results):
    results["other_shapes"]


@workers
def failing():
    """A rank fails before it meets the others, between, or behind: nobody replays, and nothing has changed."""
    for place in ("forward", "step", "end"):
        model, optimizer, _step = attached()
        fails = []

        def breaking(batch, place=place, model=model, optimizer=optimizer, fails=fails):
            bad = fails and dist.get_rank() == 1
            if bad and place == "forward":
                raise ValueError("it reads the device")
            loss = model(batch).square().mean()
            loss.backward()
            if bad and place == "step":
                raise ValueError("it reads the device")
            optimizer.step()
            optimizer.zero_grad()
            if bad and place == "end":
                raise ValueError("it reads the device")
            return loss

        captured = optimizer.capture(breaking, warmup=2)
        captured(ids(0))
        captured(ids(1))
        counts = [state["step"].clone() for state in optimizer.state.values()]
        fails.append(None)
        with pytest.raises(RuntimeError, match="could not be captured"):
            captured(ids(2))
        assert all(map(torch.equal, counts, [state["step"] for state in optimizer.state.values()]))
        assert optimizer._graphs.recorded == 1
        fails.clear()
        captured(ids(3))
        captured(ids(4))
        assert optimizer._graphs.recorded == 2
        assert all(state["step"] == 4 for state in optimizer.state.values())


def test_a_rank_that_cannot_capture_ends_it_for_all(results):
    results["failing"]


@workers
def wrapped():
    model, optimizer, _step = attached()
    model.to(torch.float32)
    outside = nn.parallel.DistributedDataParallel(model)
    captured = optimizer.capture(lambda batch: step_of(outside, optimizer, batch), warmup=1)
    captured(ids(0))
    with pytest.raises(NotImplementedError, match=r"capture\(\) of a model inside DistributedDataParallel"):
        captured(ids(1))


def test_a_model_inside_a_wrapper_is_refused(results):
    results["wrapped"]
