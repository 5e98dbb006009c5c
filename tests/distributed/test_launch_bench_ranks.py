"""The bench over ranks: the recipe of eight GPUs at two processes over gloo, from the command line to its one table."""

import json

from launch.bench import __main__ as bench_main
from launch.bench import arms, report, spec

#: One of each sharding class and its reference; every arm of the recipe takes minutes on two cores.
CHOSEN = ("ddp-fused", "forge-dp", "forge-states", "forge-fsdp")


def test_the_anchors_cells_run_at_two_ranks(tmp_path, capsys):
    out = tmp_path / "anchor.json"
    assert set(CHOSEN) < set(spec.load("anchor_8gpu", []).arms)
    overrides = ["world_size=2", "shapes=[tiny-qwen3]", "sequence=[32]", "bucket_mb=[1]", "steps=2", "warm_up=1"]
    bench = ["anchor_8gpu", *overrides, f"arms=[{','.join(CHOSEN)}]"]
    assert bench_main.main([*bench, "--rehearse", "--fork", "--out", str(out)]) == 0
    answers = {answer["cell"]["arm"]: answer for answer in json.loads(out.read_text())["cells"].values()}
    assert set(answers) == set(CHOSEN)
    for name, answer in answers.items():
        assert answer["parity"]["passed"], report.line(answer)
        assert len(answer["ranks_peak_bytes"]) == 2
        assert answer["ms"]["step"] > 0
        assert answer["parity"]["distance"] < arms.get(name).bound / 4
    stored, fused = answers["ddp-fused"], answers["forge-dp"]
    # Norms and biases keep a gradient.
    assert fused["pools"]["gradients"] == stored["pools"]["gradients"] - fused["owned_weight_bytes"] > 0
    # Half of the states.
    assert answers["forge-states"]["pools"]["states"] < 0.6 * fused["pools"]["states"]
    assert answers["forge-fsdp"]["pools"]["weights"] < 0.6 * fused["pools"]["weights"]
    said = capsys.readouterr().out
    assert said.count("ratios to 'against'") == 1
    assert all(name in said for name in CHOSEN)


def test_without_forks_the_ranks_are_torchruns(tmp_path):
    out = tmp_path / "ranks.json"
    overrides = ["shapes=[tiny-qwen3]", "batch=[1]", "sequence=[32]", "arms=[ddp-fused]", "steps=2", "warm_up=1"]
    assert bench_main.main(["data_parallel", *overrides, "bucket_mb=[1]", "--rehearse", "--out", str(out)]) == 0
    answers = json.loads(out.read_text())["cells"]
    assert answers["tiny-qwen3/b1/s32/ddp-fused/1MB/r0"]["parity"]["passed"]
