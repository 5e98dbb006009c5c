"""The bench's arms through Megatron at two ranks over gloo: recipes' cells, and what their check refuses."""

import dataclasses
import json

import megatron_ranks
import pytest
import torch.distributed as dist

from launch import config
from launch.bench import __main__ as bench_main
from launch.bench import arms, parity, report
from launch.bench.layout import Layout

SMALL = ["world_size=2", "shapes=[tiny-gpt]", "sequence=[32]", "steps=2", "warm_up=1"]
BOTH, FORGE = ("megatron", "megatron-forge"), ("megatron-forge",)


@pytest.mark.parametrize(
    ("bench", "overrides", "chosen", "place"),
    [
        ("anchor_8gpu_mixed", ["parallel=[tp2-sp]"], BOTH, "tiny-gpt/b1/s32/tp2-sp"),
        ("anchor_8gpu_experts", ["parallel=[ep2]", "experts=[4]"], FORGE, "tiny-gpt/e4/b1/s32/ep2"),
        ("pipeline_parallel", ["parallel=[pp2]", "micro_batches=[2]"], FORGE, "tiny-gpt/b1/s32/m2/pp2"),
    ],
)
def test_a_recipes_cells_run_at_two_ranks(tmp_path, capsys, bench, overrides, chosen, place):
    out = tmp_path / "out.json"
    command = [bench, *SMALL, *overrides, f"arms=[{','.join(chosen)}]", "--rehearse", "--fork", "--out", str(out)]
    assert bench_main.main(command) == 0
    answers = json.loads(out.read_text())["cells"]
    assert set(answers) == {f"{place}/{arm}/r0" for arm in chosen}
    for key, answer in answers.items():
        assert answer["parity"]["distance"] < arms.get(answer["cell"]["arm"]).bound / 4, report.line(answer)
        assert len(answer["ranks_peak_bytes"]) == 2, key
        assert answer["ms"].keys() == {"step", "forward, backward", "optimizer"}
    fused = answers[f"{place}/megatron-forge/r0"]
    # Norms and biases keep a gradient.
    assert fused["pools"]["gradients"] == fused["pools"]["weights"] - fused["owned_weight_bytes"]
    assert fused["owned_weight_bytes"] > fused["pools"]["gradients"]
    if len(chosen) > 1:
        stored = answers[f"{place}/megatron/r0"]
        assert stored["pools"]["gradients"] == stored["pools"]["weights"]
        # After four updates of the same weights from the same tokens, in another order of sums.
        assert fused["loss"] == pytest.approx(stored["loss"], rel=1e-6)
    assert f"{place} " in capsys.readouterr().out


def _distances():
    right = arms.get("megatron-forge")

    def no_decay(recipe, models):
        without = dataclasses.replace(recipe.optimizer, weight_decay=0.0)
        return right.attach(dataclasses.replace(recipe, optimizer=without), models)

    def no_sum(recipe, models):
        chunks, optimizer = right.attach(recipe, models)
        for p in chunks[0].parameters():
            # As if one rank had no tokens.
            p.register_hook(lambda gradient: gradient * (dist.get_rank() == 0))
        return chunks, optimizer

    arms.ARMS["no-decay"] = dataclasses.replace(right, attach=no_decay)
    arms.ARMS["no-sum"] = dataclasses.replace(arms.get("megatron"), attach=no_sum)
    layout = Layout(config.Parallel(data=2))
    return [parity.parity(name, "gpt", "cpu", layout) for name in ("no-decay", "no-sum")]


def test_another_update_through_megatron_is_refused():
    for told in megatron_ranks.run(2, _distances, tp=1):
        for checked in told:
            assert checked["distance"] > 4 * checked["bound"]
            assert not checked["passed"]
