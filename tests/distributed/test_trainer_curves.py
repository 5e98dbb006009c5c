"""The trainer learns, does so the same way twice, and the same with FORGE as with Megatron's optimizer."""

import math

import pytest

from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

pytestmark = NO_INDEX_BUILDER

STEPS = "run.steps=20"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def standard(data, tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("standard"), data, ("optimizer.use_forge=false", STEPS))
    job.run()
    return job


def gap(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) for step in one)


def test_it_learns(standard):
    losses = standard.losses()
    assert set(losses) == set(range(1, 21))
    assert losses[20] < losses[1] - 0.5


@pytest.mark.parametrize("arm", [(), ("optimizer.update=step",), ("batch.per_token_loss=true",)])
def test_forge_has_the_standard_curve(arm, standard, data, tmp_path):
    job = Job(tmp_path, data, ("optimizer.use_forge=true", STEPS, *arm))
    job.run()
    assert gap(job.losses(), standard.losses()) <= 2e-6
    norms = standard.grad_norms()
    assert all(norm == pytest.approx(norms[step], rel=2e-5) for step, norm in job.grad_norms().items())


def test_two_runs_are_bit_equal(data, tmp_path):
    """Field row 111, with the flag that asks for it, and dropout, which draws from every rank's own stream."""
    changes = ("run.deterministic=true", "model.dropout=0.1", "optimizer.use_forge=true", "run.steps=10")
    one, two = (Job(tmp_path / name, data, changes) for name in ("one", "two"))
    one.run()
    two.run()
    assert one.losses() == two.losses()
    assert one.state(10) == two.state(10)


def test_reordering_changes_roundings_only(standard, data, tmp_path):
    job = Job(tmp_path, data, (*standard.overrides, "run.reorder=true"))
    job.run()
    assert gap(job.losses(), standard.losses()) <= 5e-6
    # The losses of so few steps may be the same in fp32.
    assert 0 < gap(job.grad_norms(), standard.grad_norms()) <= 5e-5


def test_data_parallel_ranks_train_the_same_batch(data, tmp_path):
    """Half of every batch on each of two ranks, against all of it on one."""
    alone = ("optimizer.use_forge=false", "parallel.tensor=1", "parallel.sequence=false", STEPS)
    one, two = (Job(tmp_path / name, data, alone) for name in ("one", "two"))
    one.run(ranks=1)
    two.run("parallel.data=2")
    assert gap(one.losses(), two.losses()) <= 2e-6
    forge = Job(tmp_path / "forge", data, (*alone[1:], "optimizer.use_forge=true"))
    forge.run("parallel.data=2")
    assert gap(forge.losses(), two.losses()) <= 2e-6


@pytest.mark.parametrize("kind", ["all_gather", "a2a", "p2p"])
def test_context_parallel_ranks_train_the_same_sequences(kind, standard, data, tmp_path):
    """Two parts of every sequence on each of two ranks, against whole sequences."""
    over = ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=2", f"parallel.context_comm={kind}")
    job = Job(tmp_path, data, (*over, "optimizer.use_forge=true", STEPS))
    job.run()
    assert gap(job.losses(), standard.losses()) <= 2e-6
    norms = standard.grad_norms()
    assert all(norm == pytest.approx(norms[step], rel=2e-5) for step, norm in job.grad_norms().items())


EXPERTS = ("model.num_experts=4", "model.expert_ffn_hidden_size=32", "model.expert_aux_loss=0.01")
OVER_DATA = ("parallel.tensor=1", "parallel.sequence=false", "parallel.data=2", "run.steps=10")


@pytest.fixture(scope="module")
def all_experts(data, tmp_path_factory):
    """Megatron's optimizer with every expert on both data-parallel ranks."""
    job = Job(tmp_path_factory.mktemp("all"), data, (*EXPERTS, *OVER_DATA, "optimizer.use_forge=false"))
    job.run()
    return job


@pytest.mark.parametrize("beside", [None, "parallel.distributed_optimizer=true", "parallel.pipeline=2"])
def test_expert_parallel_ranks_train_as_those_that_have_all_experts(beside, all_experts, data, tmp_path):
    """FORGE with half of them on each of two ranks, of each of two stages."""
    job = Job(tmp_path, data, (*EXPERTS, *OVER_DATA, "parallel.expert=2", "optimizer.use_forge=true"))
    job.run(*([beside] if beside else []), ranks=4 if beside == "parallel.pipeline=2" else 2)
    assert gap(job.losses(), all_experts.losses()) <= 2e-6
    norms = all_experts.grad_norms()
    assert all(norm == pytest.approx(norms[step], rel=2e-5) for step, norm in job.grad_norms().items())


@pytest.mark.parametrize(
    "shape",
    [
        "model.normalization=LayerNorm model.activation=gelu model.bias=true model.position_embedding=learned_absolute",
        "model.qk_norm=true model.kv_channels=16 model.tied_head=true",
        "model.recompute=full",
        "model.recompute=selective",
    ],
)
def test_shapes_of_models(shape, data, tmp_path):
    """GPT-2's and Qwen3's layers, a tied head, and recomputation: FORGE's curve is the standard one."""
    curves = []
    for use in ("true", "false"):
        job = Job(tmp_path / use, data, (*shape.split(), f"optimizer.use_forge={use}", "run.steps=8"))
        job.run()
        curves.append(job.losses())
    assert gap(*curves) <= 2e-6


def test_the_records_are_complete(standard):
    from launch import metrics

    steps = metrics.read(standard.run_folder, "step")
    assert all(
        record["tokens_per_second"] > 0 and record["seconds"] > 0 and record["peak_memory_bytes"] > 0
        for record in steps
    )
    cosine = 2e-3 * (1 + math.cos(math.pi / 18)) / 2  # one of 18 steps after two of warm-up
    assert [record["lr"] for record in steps[:3]] == pytest.approx([1e-3, 2e-3, cosine], rel=1e-12)
    (valid,) = metrics.read(standard.run_folder, "valid")
    assert valid["bits_per_byte"] == pytest.approx(valid["valid_loss"] / math.log(2), rel=1e-12)
    (end,) = metrics.read(standard.run_folder, "end")
    assert end["gradient_bytes"] > 0
