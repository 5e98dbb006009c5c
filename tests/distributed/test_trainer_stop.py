"""Signals and crashes: all ranks end together with a checkpoint, or leave the last good one (rows 129 and 133)."""

import signal
import time

import psutil
import pytest

from launch import checkpoint
from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

pytestmark = NO_INDEX_BUILDER

LONG = ("run.steps=100000", "optimizer.use_forge=false", "optimizer.decay_steps=1000", "data.workers=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def ranks(agent: int) -> list[psutil.Process]:
    """The processes of the ranks, in order."""
    workers = [p for p in psutil.Process(agent).children() if "launch.worker" in p.cmdline()]
    return sorted(workers, key=lambda p: int(p.environ()["RANK"]))


def wait_for(process, what: str) -> str:
    """Read the job's output until a line has ``what`` in it; returns all that was read."""
    read = []
    for line in process.stdout:
        read.append(line)
        if what in line:
            return "".join(read)
    raise AssertionError(f"ended without {what!r}:\n{''.join(read)}")


def signal_one(process, number: int, rank: int) -> None:
    ranks(process.pid)[rank].send_signal(number)


def signal_agent(process, number: int, rank: int) -> None:
    process.send_signal(number)


def signal_all(process, number: int, rank: int = 0) -> None:
    """As scancel does: every process of the job, the loader's and the writer's among them."""
    agent = psutil.Process(process.pid)
    for each in [*agent.children(recursive=True), agent]:
        each.send_signal(number)


@pytest.mark.parametrize(
    ("send", "number", "rank"),
    [
        (signal_one, signal.SIGTERM, 0),
        (signal_one, signal.SIGTERM, 1),
        (signal_agent, signal.SIGTERM, 0),
        (signal_all, signal.SIGTERM, 0),
        (signal_all, signal.SIGINT, 0),
    ],
    ids=["TERM to rank 0", "TERM to rank 1", "TERM to the agent", "TERM to all", "INT to all"],
)
def test_a_signal_ends_all_ranks_at_one_step_with_a_checkpoint(send, number, rank, data, tmp_path):
    job = Job(tmp_path, data, LONG)
    process = job.start()
    wait_for(process, "step      2/")
    send(process, number, rank)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0, rest
    (saved,) = checkpoint.found(job.checkpoints)
    assert f"stopped at step {checkpoint.step_of(saved)} by a signal" in rest
    assert max(job.losses()) == checkpoint.step_of(saved)
    last = checkpoint.step_of(saved) + 2
    assert f"resumed from {saved.name}" in job.run(f"run.steps={last}")
    assert set(job.losses()) == set(range(1, last + 1))


def test_killed_in_the_middle_of_a_save(data, tmp_path):
    """What the killed save left is not taken for a checkpoint, and training goes on from the one before."""
    job = Job(tmp_path, data, (*LONG, "checkpoint.every=4"))
    process = job.start()
    wait_for(process, "step      5/")
    partial = job.checkpoints / ".partial-step_00000008"
    while not partial.exists():
        time.sleep(0.001)
    signal_all(process, signal.SIGKILL)
    process.communicate(timeout=60)
    kept = checkpoint.found(job.checkpoints)[0]
    assert checkpoint.step_of(kept) == 4
    assert f"resumed from {kept.name}" in job.run("run.steps=9")
    assert checkpoint.step_of(checkpoint.found(job.checkpoints)[0]) == 9
    assert not partial.exists()


def test_a_damaged_newest_checkpoint_is_passed_over(data, tmp_path):
    job = Job(tmp_path, data, ("optimizer.use_forge=false",))
    job.run("checkpoint.every=3")
    shard = sorted((job.checkpoints / "step_00000006").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    said = job.run("run.steps=8", "optimizer.decay_steps=6")
    assert f"step_00000006 is damaged and passed over: {shard.name} was changed" in said
    assert "resumed from step_00000003" in said


def test_the_self_test_writes_reads_and_leaves_nothing(data, tmp_path):
    job = Job(tmp_path, data, ("checkpoint.self_test=true", "run.steps=3", "checkpoint.every=2"))
    job.run()
    assert sorted(p.name for p in job.checkpoints.iterdir()) == ["step_00000002", "step_00000003"]


def test_a_folder_that_cannot_be_saved_to_fails_after_the_first_step(data, tmp_path):
    """Row 130: not at the end of the run."""
    job = Job(tmp_path, data, ("checkpoint.self_test=true", "optimizer.use_forge=false"))
    job.arguments()
    job.checkpoints.write_text("in the way")
    job.run(code=1)
    assert set(job.losses()) == {1}


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_of_it(data, tmp_path):
    job = Job(tmp_path, data, ("optimizer.use_forge=false", "optimizer.lr=1e30", "checkpoint.every=1", "run.steps=50"))
    said = job.run(code=1)
    assert "FloatingPointError: loss" in said
    assert checkpoint.step_of(checkpoint.found(job.checkpoints)[0]) == max(job.losses())
