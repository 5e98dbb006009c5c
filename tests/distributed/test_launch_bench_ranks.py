"""The bench over ranks: the recipe of eight GPUs at two processes over gloo, from the command line to its one table."""

import json

from launch.bench import __main__ as bench_main
from launch.bench import arms, report, spec

LEFT_OUT = {"ddp-bitsandbytes"}  # a peer's package, which the tests do not install


def test_the_anchors_cells_run_at_two_ranks(tmp_path, capsys):
    out = tmp_path / "anchor.json"
    chosen = [name for name in spec.load("anchor_8gpu", []).arms if name not in LEFT_OUT]
    overrides = ["world_size=2", "shapes=[tiny-qwen3]", "sequence=[32]", "bucket_mb=[1]", "steps=2", "warm_up=1"]
    bench = ["anchor_8gpu", *overrides, f"arms=[{','.join(chosen)}]"]
    bench_main.main([*bench, "--rehearse", "--fork", "--out", str(out)])
    answers = {answer["cell"]["arm"]: answer for answer in json.loads(out.read_text())["cells"].values()}
    assert set(answers) == set(chosen)
    for name, answer in answers.items():
        if "left_out" in answer:
            assert "is not built yet" in answer["left_out"]
            continue
        assert answer["parity"]["passed"], report.line(answer)
        assert len(answer["ranks_peak_bytes"]) == 2
        assert answer["ms"]["step"] > 0
        assert arms.get(name).bound is None or answer["parity"]["distance"] < arms.get(name).bound / 4
    stored, fused = answers["ddp-fused"], answers["forge-dp"]
    # Norms and biases keep a gradient.
    assert fused["pools"]["gradients"] == stored["pools"]["gradients"] - fused["owned_weight_bytes"] > 0
    # Half of the states.
    assert answers["forge-states"]["pools"]["states"] < 0.6 * fused["pools"]["states"]
    assert answers["forge-fsdp"]["pools"]["weights"] < 0.6 * fused["pools"]["weights"]
    said = capsys.readouterr().out
    assert said.count("ratios to 'against'") == 1
    assert all(name in said for name in chosen)


def test_without_forks_the_ranks_are_torchruns(tmp_path):
    out = tmp_path / "ranks.json"
    overrides = ["shapes=[tiny-qwen3]", "batch=[1]", "sequence=[32]", "arms=[ddp-fused]", "steps=2", "warm_up=1"]
    assert bench_main.main(["data_parallel", *overrides, "bucket_mb=[1]", "--rehearse", "--out", str(out)]) == 0
    answers = json.loads(out.read_text())["cells"]
    assert answers["tiny-qwen3/b1/s32/ddp-fused/1MB/r0"]["parity"]["passed"]
