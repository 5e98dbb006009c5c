"""Benches of arms through Megatron: degrees by name, the recipes that they make, and what is refused before it runs."""

import pytest

from launch import config
from launch.bench import __main__ as bench_main
from launch.bench import layout, shapes, spec
from launch.bench.arm import Settings

MEGATRON_BENCHES = [
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "anchor_8gpu_mixed",
    "anchor_8gpu_experts",
]


@pytest.mark.parametrize(
    ("text", "world", "degrees"),
    [
        ("tp2-sp", 2, {"tensor": 2, "sequence": True, "data": 1}),
        ("tp2-sp-cp2-dp2", 8, {"tensor": 2, "sequence": True, "context": 2, "data": 2}),
        ("ep8", 8, {"expert": 8, "data": 8}),
        ("cp2-a2a", 4, {"context": 2, "context_comm": "a2a", "data": 2}),
        ("cp2-p2p", 2, {"context": 2, "context_comm": "p2p"}),
        ("pp2-vpp2", 2, {"pipeline": 2, "virtual_pipeline": 2, "data": 1}),
    ],
)
def test_degrees_are_read(text, world, degrees):
    assert layout.parse(text, world) == config.Parallel(**degrees)


@pytest.mark.parametrize("text", ["tp3", "tp2-dp2", "tensor2", "tp", "tp0", "sp2", ""])
def test_degrees_that_are_none_of_two_ranks_are_refused(text):
    with pytest.raises(ValueError, match="parallel: "):
        layout.parse(text, 2)


@pytest.mark.parametrize("name", MEGATRON_BENCHES)
def test_every_recipe_can_run(name):
    bench = spec.load(name, [])
    assert bench.parallel
    assert bench_main.refuse(bench, rehearse=True) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=[]"], "names no degrees, and arms has megatron"),
        (["arms=[ddp-fused]"], "arms has ddp-fused"),
        (["parallel=[cp2]", "sequence=[30]"], "data.sequence_length: 30 is not divisible by 2 * parallel.context=4"),
        (["arms=[megatron-zero]"], "parallel.distributed_optimizer: states are shared over data ranks"),
        (["experts=[4]"], "parallel.sequence: experts beside parallel.tensor above 1 need it"),
        (["experts=[3]", "parallel=[ep2]"], "model.num_experts: 3 is not divisible by parallel.expert=2"),
    ],
)
def test_what_cannot_be_is_refused_before_a_cell_runs(overrides, said, capsys):
    assert bench_main.main(["tensor_parallel", *overrides, "--rehearse"]) == bench_main.IMPOSSIBLE
    assert said in capsys.readouterr().err


def test_a_shape_of_megatron_needs_degrees(capsys):
    command = ["data_parallel", "shapes=[tiny-gpt]", "--rehearse"]
    assert bench_main.main(command) == bench_main.IMPOSSIBLE
    assert "tiny-gpt is built through Megatron only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("gpt-24x2048", 1340e6), ("gpt-24x2560", 2052e6), ("gpt-24x4096", 5096e6)],
)
def test_the_papers_shapes_have_the_papers_parameters(shape, parameters):
    """Appendix N.2's second table gives those of a rank of two."""
    s = shapes.get(shape)
    layer = 4 * s.hidden_size**2 + 2 * s.hidden_size * s.intermediate_size
    biases = 9 * s.hidden_size + 4 * s.hidden_size
    counted = s.num_hidden_layers * (layer + biases) + s.vocab_size * s.hidden_size
    assert counted == pytest.approx(parameters, abs=1e6)


def test_cells_of_other_degrees_are_checked_apart():
    cell = spec.Cell("tiny-gpt", "megatron", 1, 16, parallel="tp2")
    known = {"cell": vars(cell), "parity": {"kind": "gpt"}}
    log = {"cells": {cell.key: known}}
    for other in ({"parallel": "pp2"}, {"micro_batches": 2}, {"experts": 4}, {"shape": "tiny-qwen3"}):
        assert bench_main.known_parity(log, spec.Cell(**{**vars(cell), **other})) is None
    assert bench_main.known_parity(log, spec.Cell(**{**vars(cell), "sequence": 32})) is known["parity"]


def test_a_cells_recipe_has_its_batch_and_an_arms_keys():
    cell = spec.Cell("qwen3-8b", "megatron-zero", 2, 2048, parallel="tp2-sp", micro_batches=3)
    changes = {"parallel.distributed_optimizer": True, "optimizer.recipe": "fp32-master"}
    made = layout.recipe(
        shapes.get(cell.shape), cell.layout(4), cell.batch, cell.sequence, Settings(1e-5, 0.01), "cuda", changes
    )
    assert (made.micro_batches, made.batch.micro, made.parallel.data, made.world_size) == (3, 2, 2, 4)
    assert (made.model.num_query_groups, made.model.qk_norm, made.model.dtype) == (8, True, "bf16")
    assert made.parallel.distributed_optimizer
    assert made.optimizer.recipe == "fp32-master"
