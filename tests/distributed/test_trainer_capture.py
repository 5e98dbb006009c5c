"""A captured run of the trainer is bit-equal to one that is not, on one rank; a stand-in replays the device's part."""

import shutil

import pytest

from launch import checkpoint, metrics
from tests.distributed.replaying_worker import RECORDED
from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

pytestmark = NO_INDEX_BUILDER

ONE_RANK = ("parallel.tensor=1", "parallel.sequence=false", "run.steps=8", "checkpoint.every=5", "validation.every=3")
WORKER = "tests.distributed.replaying_worker"
ARMS = {
    "clipped, two micro-batches, dropout": ("model.dropout=0.1",),
    "a rule with numbers of the host, in backward": ("optimizer.rule=nadam", "optimizer.clip_grad=0", "batch.micro=4"),
    "bf16 with master, divided by the tokens": (
        *("model.dtype=bf16", "optimizer.recipe=fp32-master", "batch.per_token_loss=true"),
    ),
    "bf16, rounded stochastically, in backward": (
        *("model.dtype=bf16", "optimizer.recipe=sr-store", "optimizer.clip_grad=0", "batch.micro=4"),
    ),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def told(job):
    """What the run's log says of steps and validations, without times and memory."""
    names = ("step", "loss", "grad_norm", "lr", "valid_loss")
    records = [*metrics.read(job.run_folder, "step"), *metrics.read(job.run_folder, "valid")]
    return [[record.get(name) for name in names] for record in records]


@pytest.mark.parametrize("arm", ARMS)
def test_bit_equal_to_a_run_that_is_not_captured(arm, data, tmp_path):
    """Eight steps, of which three run as they are and five are replayed, with validation and a checkpoint between."""
    eager = Job(tmp_path / "eager", data, (*ONE_RANK, *ARMS[arm]))
    eager.run(ranks=1)
    captured = Job(tmp_path / "captured", data, (*eager.overrides, "run.capture=true"), WORKER)
    assert captured.run(ranks=1).count(RECORDED) == 1
    assert len(told(eager)) == 8 + 3
    assert told(captured) == told(eager)
    assert captured.state(5) == eager.state(5)
    assert captured.state(8) == eager.state(8)


@pytest.mark.parametrize("captures", [True, False], ids=["captured goes on", "eager goes on"])
def test_a_checkpoint_of_one_kind_is_resumed_by_the_other(captures, data, tmp_path):
    jobs = {
        True: Job(tmp_path / "captured", data, (*ONE_RANK, "model.dropout=0.1", "run.capture=true"), WORKER),
        False: Job(tmp_path / "eager", data, (*ONE_RANK, "model.dropout=0.1")),
    }
    begun, resumed = jobs[not captures], jobs[captures]
    begun.run("checkpoint.every=2", "checkpoint.keep=4", ranks=1)
    resumed.checkpoints.mkdir(parents=True)
    shutil.copytree(begun.checkpoints / "step_00000002", resumed.checkpoints / "step_00000002")
    said = resumed.run(ranks=1)
    assert "resumed from step_00000002" in said
    assert said.count(RECORDED) == captures
    assert resumed.losses() == {step: begun.losses()[step] for step in range(3, 9)}
    assert resumed.state(8) == begun.state(8)


def test_a_signal_ends_a_captured_run_with_a_checkpoint(data, tmp_path):
    """The stop signal arrives while steps are replayed."""
    job = Job(tmp_path, data, (*ONE_RANK, "run.steps=1000", "run.capture=true", "stop_at=7"), WORKER)
    said = job.run(ranks=1)
    assert RECORDED in said
    (saved, *_) = checkpoint.found(job.checkpoints)
    assert checkpoint.step_of(saved) == max(job.losses()) == 7
    assert "stopped at step 7 by a signal" in said


def test_a_run_on_the_cpu_is_refused_by_the_parameters_device(data, tmp_path):
    said = Job(tmp_path, data, (*ONE_RANK, "run.capture=true")).run(ranks=1, code=1)
    assert "is on cpu; capture() needs every parameter on one CUDA device" in said
