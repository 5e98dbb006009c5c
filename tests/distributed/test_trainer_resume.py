"""Stop and go on: every weight, moment, step count, random state and sample is what it would have been.

Field rows 105, 118, 119, 120 and 121: moments dropped, dropped in part, cast, or a step count begun anew. The first
step after a resume hides lost moments, so that whole curves and the final state are compared, bit for bit.
"""

import shutil

import pytest
from megatron.core import dist_checkpointing

from launch import metrics
from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

pytestmark = NO_INDEX_BUILDER

ARMS = {
    "standard": ("optimizer.use_forge=false",),
    "forge, waiting": ("optimizer.use_forge=true",),
    "forge, in backward": ("optimizer.use_forge=true", "optimizer.clip_grad=0", "batch.micro=4"),
    "forge, bf16 states": ("optimizer.use_forge=true", "optimizer.recipe=bf16-state"),
    "forge, bf16 with master": ("optimizer.use_forge=true", "model.dtype=bf16", "optimizer.recipe=fp32-master"),
    "forge, context-parallel": ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=2"),
    "forge, expert-parallel": (
        *("parallel.tensor=1", "parallel.sequence=false", "parallel.data=2", "parallel.expert=2"),
        *("model.num_experts=4", "model.expert_aux_loss=0.01"),
    ),
    "forge, weights as codes": ("model.dtype=bf16", "optimizer.recipe=fp8-weight", "optimizer.clip_grad=0"),
    "forge, 8-bit rows": (
        *("parallel.tensor=1", "parallel.sequence=false", "parallel.data=2", "batch.micro=1"),
        *("parallel.distributed_optimizer=true", "model.dtype=bf16", "optimizer.recipe=int8", "optimizer.rule=lamb"),
    ),
    "forge, another rule": ("optimizer.rule=nadam", "model.dtype=bf16", "optimizer.recipe=fp32-master"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def job_of_two_steps(data, tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("two"), data, (*ARMS["standard"], "optimizer.decay_steps=4"))
    job.run("run.steps=2")
    return job


@pytest.mark.parametrize("arm", ARMS)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(arm, data, tmp_path):
    straight = Job(tmp_path / "straight", data, (*ARMS[arm], "model.dropout=0.1"))
    straight.run("checkpoint.every=3")
    resumed = Job(tmp_path / "resumed", data, straight.overrides)
    resumed.checkpoints.mkdir(parents=True)
    shutil.copytree(straight.checkpoints / "step_00000003", resumed.checkpoints / "step_00000003")
    assert "resumed from step_00000003" in resumed.run()
    after = {4, 5, 6}
    assert set(resumed.losses()) == after
    assert resumed.losses() == {step: straight.losses()[step] for step in after}
    assert resumed.grad_norms() == {step: straight.grad_norms()[step] for step in after}
    assert resumed.state(6) == straight.state(6)


def test_states_sharded_over_data_parallel_ranks_resume(data, tmp_path):
    """The curve of Megatron's DistributedOptimizer, and a stop that nothing shows of, with the states' self-test."""
    sharded = ("parallel.tensor=1", "parallel.sequence=false", "parallel.data=2", "batch.micro=1", "run.steps=4")
    sharded += ("parallel.distributed_optimizer=true", "model.dtype=bf16", "optimizer.recipe=fp32-master")
    straight = Job(tmp_path / "straight", data, sharded)
    straight.run("checkpoint.every=2", "checkpoint.self_test=true")
    resumed = Job(tmp_path / "resumed", data, sharded)
    resumed.checkpoints.mkdir(parents=True)
    shutil.copytree(straight.checkpoints / "step_00000002", resumed.checkpoints / "step_00000002")
    assert "resumed from step_00000002" in resumed.run()
    assert resumed.losses() == {step: straight.losses()[step] for step in (3, 4)}
    assert resumed.state(4) == straight.state(4)
    megatron = Job(tmp_path / "megatron", data, (*sharded, "optimizer.use_forge=false"))
    megatron.run("checkpoint.save=false")
    assert straight.losses() == pytest.approx(megatron.losses(), abs=2e-3)


@pytest.mark.parametrize("arm", ["standard", "forge, in backward"])
def test_a_checkpoint_is_read_by_another_number_of_ranks(arm, data, tmp_path):
    """The same curve on one rank, to rounding: all states were resharded, and none was lost."""
    two = Job(tmp_path / "two", data, ARMS[arm])
    two.run("checkpoint.every=3")
    one = Job(tmp_path / "one", data, (*ARMS[arm], "parallel.tensor=1", "parallel.sequence=false"))
    one.checkpoints.mkdir(parents=True)
    shutil.copytree(two.checkpoints / "step_00000003", one.checkpoints / "step_00000003")
    assert "written by 2 ranks and is read by 1" in one.run(ranks=1)
    for step in (4, 5, 6):
        assert one.losses()[step] == pytest.approx(two.losses()[step], abs=5e-6)


def test_experts_are_read_by_another_number_of_expert_parallel_ranks(data, tmp_path):
    """Half of them on each of two ranks, and then all on both; Megatron's own optimizer refuses by the key."""
    experts = ("model.num_experts=4", "parallel.tensor=1", "parallel.sequence=false", "parallel.data=2", "run.steps=4")
    apart = Job(tmp_path / "apart", data, (*experts, "optimizer.use_forge=true"))
    apart.run("parallel.expert=2", "checkpoint.every=2")
    for forge in ("true", "false"):
        together = Job(tmp_path / forge, data, (*experts, f"optimizer.use_forge={forge}"))
        together.checkpoints.mkdir(parents=True)
        shutil.copytree(apart.checkpoints / "step_00000002", together.checkpoints / "step_00000002")
        said = together.run(code=0 if forge == "true" else 1)
        if forge == "false":
            assert "parallel.expert: 1 here, 2 in the checkpoint" in said
            continue
        for step in (3, 4):
            assert together.losses()[step] == pytest.approx(apart.losses()[step], abs=5e-6)
            assert together.grad_norms()[step] == pytest.approx(apart.grad_norms()[step], rel=2e-5)


@pytest.mark.parametrize("arm", ["standard", "forge, waiting", "forge, bf16 with master", "forge, expert-parallel"])
def test_another_schedule_is_refused_by_its_key_or_taken_when_asked(arm, data, tmp_path):
    job = Job(tmp_path / "job", data, (*ARMS[arm], "optimizer.decay_style=constant", "optimizer.decay_steps=10"))
    job.run("run.steps=3")
    said = job.run("run.steps=5", "optimizer.lr=1e-3", code=1)
    assert "optimizer.lr: 0.001 here, 0.002 in the checkpoint" in said
    job.run("run.steps=5", "optimizer.lr=1e-3", "checkpoint.override_schedule=true")
    rates = [record["lr"] for record in metrics.read(job.run_folder, "step")]
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3, 1e-3, 1e-3])
    saved = dist_checkpointing.load_common_state_dict(str(job.checkpoints / "step_00000005"))["optimizer"]
    groups = _param_groups(saved)
    assert groups
    rates = [group[key] for group in groups for key in ("lr", "max_lr")]
    assert rates == pytest.approx([1e-3] * len(rates))


def _param_groups(saved):
    """Of every optimizer in a checkpoint."""
    if not isinstance(saved, dict):
        return []
    return [*saved.get("param_groups", []), *(group for part in saved.values() for group in _param_groups(part))]


@pytest.mark.parametrize("change", ["run.seed=5", "batch.total=8", "model.rotary_base=500", "optimizer.beta2=0.99"])
def test_what_a_run_cannot_change_is_refused_by_its_key(change, job_of_two_steps):
    key, value = change.split("=")
    assert f"{key}: {value} here, " in job_of_two_steps.run("run.steps=4", change, code=1)
    assert set(job_of_two_steps.losses()) == {1, 2}


def test_another_rule_is_refused(job_of_two_steps):
    said = job_of_two_steps.run("run.steps=4", "optimizer.use_forge=true", "optimizer.rule=lion", code=1)
    assert "optimizer.rule: lion here, adamw in the checkpoint" in said


def test_another_model_is_refused(job_of_two_steps):
    said = job_of_two_steps.run("run.steps=4", "model.qk_norm=true", code=1)
    assert "does not fit this run: it lacks" in said
    assert "q_layernorm" in said
