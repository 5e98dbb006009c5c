"""The bench: what it refuses to time, which cells it runs, and what it makes of them. No time is taken here."""

import json

import pytest

from launch import config
from launch.bench import __main__ as bench_main
from launch.bench import arms, cell, report, spec


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-fused-in-backward", "forge", "forge-head"])
def test_an_exact_arm_makes_torch_updates(name):
    assert cell.parity(name, "llama", "cpu")["distance"] < cell.PARITY_BOUND / 4


@pytest.mark.parametrize("wrong", [{"weight_decay": 0.0}, {"lr": 1.02e-3}, {"betas": (0.9, 0.99)}])
def test_an_arm_with_another_update_is_seen(monkeypatch, wrong):
    import torch

    def attach(model, lr, weight_decay):
        settings = {"lr": lr, "weight_decay": weight_decay, "betas": arms.BETAS, "eps": arms.EPS}
        return torch.optim.AdamW(model.parameters(), **settings | wrong)

    monkeypatch.setitem(arms.ARMS, "wrong", arms.Arm(attach))
    assert not cell.parity("wrong", "llama", "cpu")["passed"]


def test_every_committed_bench_can_be_read_and_names_known_arms():
    files = sorted(spec.BENCHES.glob("*.yaml"))
    assert files
    for file in files:
        bench = spec.load(str(file), [])
        assert bench.baseline in bench.arms
        assert all(arms.get(name) for name in bench.arms)


def test_unknown_keys_and_arms_are_refused(capsys):
    with pytest.raises(config.RecipeError, match="did you mean steps"):
        spec.load("llama3_8b", ["step=3"])
    assert bench_main.main(["llama3_8b", "arms=[adamw]"]) == bench_main.IMPOSSIBLE
    assert "there is no arm 'adamw'; there are: adamw-foreach" in capsys.readouterr().err


def test_the_arms_of_a_cell_run_beside_each_other():
    bench = spec.load("llama3_8b", ["sequence=[512,2048]", "arms=[adamw-fused,forge]"])
    keys = [one.key for one in spec.cells(bench)]
    assert keys == ["adamw-fused/b1/s512/r0", "forge/b1/s512/r0", "adamw-fused/b1/s2048/r0", "forge/b1/s2048/r0"]


def log(**cells):
    gpu = {"name": "a GPU"}
    provenance = {"source_sha256": "1", "versions": {"torch": "2"}, "gpus": [gpu]}
    return {"bench": {"baseline": "adamw-fused"}, "model": {}, "provenance": provenance, "cells": cells}


def answer(step, peak):
    return {"ms": {"step": step}, "peak_bytes": peak, "parity": {"distance": 1e-6}}


def test_ratios_are_to_the_baseline_of_the_same_cell(tmp_path):
    cells = {
        "adamw-fused/b1/s512/r0": answer(100.0, 4 << 30),
        "forge/b1/s512/r0": answer(60.0, 3 << 30),
        "forge/b1/s512/r1": answer(40.0, 2 << 30),
        "forge/b1/s2048/r0": {"out_of_memory": "CUDA out of memory"},
    }
    row = report.merged(log(**cells))[1, 512]
    assert (row["forge"]["ms"], row["forge"]["peak_bytes"]) == (50.0, 3 << 30)
    assert row["forge"]["spread_ms"] == pytest.approx(14.142, abs=1e-3)
    table = report.table(log(**cells))
    assert list(table.columns[3].cells) == ["1.000", "0.500", ""]
    assert list(table.columns[5].cells) == ["1.000", "0.750", ""]
    report.plot(log(**cells), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_results_of_other_sources_are_not_continued(tmp_path):
    out = tmp_path / "out.json"
    out.write_text(json.dumps(log(**{"forge/b1/s512/r0": answer(1.0, 1)})))
    head = {key: value for key, value in log().items() if key != "cells"}
    assert len(bench_main.resume(out, head)["cells"]) == 1
    head["provenance"] = {**head["provenance"], "source_sha256": "2"}
    assert bench_main.resume(out, head)["cells"] == {}
