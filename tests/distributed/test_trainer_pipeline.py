"""The trainer in pipeline stages: the run of one process, stopped and resumed, and read at another number of stages."""

import shutil

import pytest

from launch import metrics
from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

pytestmark = NO_INDEX_BUILDER

# Gate MG's: four units in the last place of a loss of 5.9.
LOSS = 2e-6
BASE = (
    "parallel.tensor=1",
    "parallel.sequence=false",
    "model.num_layers=4",
    "batch.total=8",
    "run.steps=4",
    "checkpoint.every=2",
)
STAGES, CHUNKS = "parallel.pipeline=2", "parallel.virtual_pipeline=2"
TIED = ("model.tied_head=true", "optimizer.fused_head=true")
BACKWARD = ("optimizer.clip_grad=0", "batch.micro=8")
# name: (of the model and optimizer, of the pipeline, ranks)
RUNS = {
    "1F1B, in backward": (BACKWARD, (STAGES,), 2),
    "1F1B, tied, fused head": (TIED, (STAGES,), 2),
    "interleaved": ((), (STAGES, CHUNKS), 2),
    "interleaved, standard": ((), (STAGES, CHUNKS, "optimizer.use_forge=false"), 2),
    "tensor parallel": ((), (STAGES, "parallel.tensor=2", "parallel.sequence=true"), 4),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A finished run; each is made once."""
    made = {}

    def run(changes: tuple[str, ...], layout: tuple[str, ...] = (), ranks: int = 1) -> Job:
        key = changes, layout
        if key not in made:
            made[key] = Job(tmp_path_factory.mktemp("run"), data, (*BASE, *changes, *layout))
            made[key].run(ranks=ranks)
        return made[key]

    return run


def resume(job: Job, written: Job, ranks: int) -> str:
    """Go on from the checkpoint that ``written`` left after two steps."""
    job.checkpoints.mkdir(parents=True)
    shutil.copytree(written.checkpoints / "step_00000002", job.checkpoints / "step_00000002")
    return job.run(ranks=ranks)


def validation(job: Job) -> float:
    return metrics.read(job.run_folder, "valid")[-1]["valid_loss"]


@pytest.mark.parametrize("name", RUNS)
def test_a_pipeline_has_the_run_of_one_process(name, trained):
    changes, layout, ranks = RUNS[name]
    one, staged = trained(changes), trained(changes, layout, ranks)
    assert staged.losses() == pytest.approx(one.losses(), abs=LOSS, rel=0)
    assert staged.grad_norms() == pytest.approx(one.grad_norms(), rel=1e-5)
    assert validation(staged) == pytest.approx(validation(one), abs=LOSS, rel=0)


def test_initial_weights_do_not_depend_on_the_stages(data, tmp_path):
    """Those of a checkpoint after a step that moves nothing, bit for bit."""
    still = (*BASE, "run.steps=1", "optimizer.lr=0", "optimizer.warmup_steps=0")
    one, staged = Job(tmp_path / "one", data, still), Job(tmp_path / "staged", data, (*still, STAGES, CHUNKS))
    one.run(ranks=1)
    staged.run()
    weights = [
        {key: value for key, value in job.state(1).items() if key.endswith(("weight", "bias")) and "optim" not in key}
        for job in (one, staged)
    ]
    assert any(key.startswith("output_layer") for key in weights[0])
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("written", "read"), [("one", "interleaved"), ("interleaved", "one")])
def test_a_checkpoint_is_read_at_another_number_of_stages(written, read, trained, data, tmp_path):
    runs = {"one": trained(()), "interleaved": trained(*RUNS["interleaved"])}
    ranks = {"one": 1, "interleaved": 2}
    job = Job(tmp_path, data, runs[read].overrides)
    said = resume(job, runs[written], ranks[read])
    assert f"written by {ranks[written]} ranks and is read by {ranks[read]}" in said
    assert job.losses() == pytest.approx({step: runs[written].losses()[step] for step in (3, 4)}, abs=LOSS, rel=0)


RESUMED = {
    "1F1B, tied, fused head": (STAGES, *TIED, "checkpoint.self_test=true"),
    "interleaved, standard": (STAGES, CHUNKS, "optimizer.use_forge=false"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_pipeline_is_bit_equal_to_one_that_never_stopped(name, data, tmp_path):
    straight = Job(tmp_path / "straight", data, (*BASE, *RESUMED[name], "model.dropout=0.1"))
    straight.run()
    resumed = Job(tmp_path / "resumed", data, straight.overrides)
    assert "resumed from step_00000002" in resume(resumed, straight, 2)
    assert resumed.losses() == {step: straight.losses()[step] for step in (3, 4)}
    assert resumed.grad_norms() == {step: straight.grad_norms()[step] for step in (3, 4)}
    assert resumed.state(4) == straight.state(4)
