"""The bench: what it refuses to time, which cells it runs, and what it makes of them. No time is taken here."""

import dataclasses
import functools
import importlib.util
import json

import pytest
import torch

from launch import config
from launch.bench import __main__ as bench_main
from launch.bench import arms, cell, figure, model, parity, processes, references, report, rule_arms, shapes, spec
from launch.bench.arm import PARITY_BOUND, Arm

TINY = ["shapes=[tiny-llama]", "sequence=[16]", "steps=2", "warm_up=1"]


@pytest.mark.parametrize(
    "name",
    [
        "adamw-fused",
        "adamw-fused-in-backward",
        "forge",
        "forge-head",
        "adamw-fused-clip",
        "forge-clip",
        "adamw-fused-micro",
        "forge-micro",
    ],
)
def test_an_exact_arm_makes_its_judges_updates(name):
    assert parity.parity(name, "llama", "cpu")["distance"] < PARITY_BOUND / 4


@pytest.mark.parametrize("wrong", [{"weight_decay": 0.0}, {"lr": 1.02e-3}, {"betas": (0.9, 0.99)}])
def test_an_arm_with_another_update_is_seen(monkeypatch, wrong):
    def attach(model, settings):
        return torch.optim.AdamW(model.parameters(), **settings.adamw | wrong)

    monkeypatch.setitem(arms.ARMS, "wrong", Arm(attach))
    checked = parity.parity("wrong", "llama", "cpu")
    assert not checked["passed"]
    assert "is above 5e-03: nothing is reported" in parity.refusal(arms.get("wrong"), checked)


@pytest.mark.parametrize("name", ["forge-clip", "forge-micro"])
def test_what_a_loop_leaves_out_is_seen(monkeypatch, name):
    """An arm that does not clip, or that steps from one micro-batch of four."""
    monkeypatch.setitem(arms.ARMS, "wrong", dataclasses.replace(arms.get("forge"), judge=arms.get(name).judge))
    assert parity.parity("wrong", "llama", "cpu")["distance"] > 4 * PARITY_BOUND


def test_every_rule_has_a_case_and_its_reference_is_its_judge():
    from forge_megatron import rules

    assert set(rule_arms.CASES) == set(rules.available())
    for name in rules.available():
        arm = arms.get(f"forge-{name}")
        assert arm.judge == arm.against == f"{name}-reference"
        assert arm.captured
        assert arm.approximate == (rules.get(name).regime == "projected")


def needs(name: str) -> None:
    """Skips, and says so, where the authors' package is not installed."""
    if importlib.util.find_spec(f"{name}_torch") is None:
        pytest.skip(f"NOT RUN: {name}-torch, of the peers extra, is not installed")


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_galores_reference_begins_between_two_refreshes_where_an_svd_takes_hours(monkeypatch, shape):
    needs("galore")
    monkeypatch.setattr(rule_arms, "MOST_FOR_SVD", 0)
    monkeypatch.setitem(rule_arms.GALORE, "rank", 3)
    p = torch.nn.Parameter(torch.randn(shape))
    optimizer = rule_arms._galore([p], lr=0.1)
    p.grad = torch.randn(shape)
    before, projector = p.detach().clone(), optimizer.state[p]["projector"]
    basis = projector.ortho_matrix.clone()
    optimizer.step()
    # Its own arithmetic, on the projection that it was given.
    assert torch.equal(projector.ortho_matrix, basis)
    assert torch.linalg.matrix_rank(p.detach() - before) == 3
    assert optimizer.state[p]["exp_avg"].shape == ((40, 3) if shape[0] > shape[1] else (3, 40))


@pytest.mark.parametrize("name", ["lamb", "adafactor", "adalomo", "adam_mini", "lars", "sm3", "nadam", "lion"])
def test_a_rule_makes_its_references_updates(name):
    assert parity.parity(f"forge-{name}", "llama", "cpu")["distance"] < PARITY_BOUND / 4


def test_lion_has_peers_that_step_as_it_does_and_states_of_8_bits_that_are_reported():
    """The package's, all weights at once, is bounded; a state of 8 bits is another number in each of its blocks."""
    assert parity.parity("lion-stored", "llama", "cpu")["distance"] < PARITY_BOUND / 4
    for name in ("forge-lion-int8", "forge-lion-fp8"):
        checked = parity.parity(name, "llama", "cpu")
        assert checked["bound"] is None
        assert PARITY_BOUND / 4 < checked["distance"] < 0.5


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_an_arm_that_refreshes_does_so_at_every_step_and_is_no_graph(name):
    arm = arms.get(f"forge-{name}-refresh")
    optimizer = arm.attach(model.build(shapes.get("tiny-llama"), "cpu"), parity.SETTINGS)
    gaps = {group["update_proj_gap"] for group in optimizer.param_groups if "rank" in group}
    assert (gaps, arm.captured, arm.approximate) == ({1}, False, True)


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_an_arm_that_refreshes_takes_steps(name):
    needs(name)
    checked = parity.parity(f"forge-{name}-refresh", "llama", "cpu")
    # Another projection than its reference's; without steps the distance would be 1.
    assert checked["bound"] is None
    assert 0.0 < checked["distance"] < 0.6


def in_other_roundings(attach):
    """An arm whose linears' outputs are one relative part in a million off: another order of every sum, as on a GPU."""
    generator = torch.Generator().manual_seed(0)

    def noisy(module, args, out):
        return out * (1 + 1e-6 * torch.randn(out.shape, generator=generator))

    def attached(model, settings):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(noisy)
        return attach(model, settings)

    return attached


@pytest.mark.parametrize("name", ["lion", "adagrad", "rmsprop"])
def test_a_rule_that_steps_by_a_sign_is_compared_step_by_step(monkeypatch, name):
    """Left to themselves, two runs of Lion's own reference part: a sign that a last bit decides is a whole step."""
    noisy = in_other_roundings(arms.get(f"{name}-reference").attach)
    arm = dataclasses.replace(arms.get(f"forge-{name}"), attach=noisy)
    monkeypatch.setitem(arms.ARMS, "stepwise", arm)
    stepwise = parity.parity("stepwise", "llama", "cpu")
    assert stepwise["distance"] < PARITY_BOUND
    if name == "lion":
        # Whether a sign of the others' first steps flips, after which they shrink, hangs on the processor's own sums.
        monkeypatch.setitem(arms.ARMS, "alone", dataclasses.replace(arm, stepwise=False))
        alone = parity.parity("alone", "llama", "cpu")
        assert not alone["passed"]
        assert stepwise["distance"] < alone["distance"] / 3


@pytest.mark.parametrize(
    "wrong", [{"both": {}}, {"both": {"weight_decay": 1.0, "betas": (0.9, 0.98)}}, {"rate": 0.102}]
)
def test_a_wrong_lion_is_seen(monkeypatch, wrong):
    case = dataclasses.replace(rule_arms.CASES["lion"], **wrong)
    attach = functools.partial(rule_arms._attach, "lion", case, "fp32")
    monkeypatch.setitem(arms.ARMS, "changed", dataclasses.replace(arms.get("forge-lion"), attach=attach))
    assert parity.parity("changed", "llama", "cpu")["distance"] > 2 * PARITY_BOUND


@pytest.mark.parametrize("wrong", [{}, {"momentum": 0.9}, {"weight_decay": 0.0}])
def test_a_wrong_muon_is_seen_behind_newton_schulzs_roundings(monkeypatch, wrong):
    case = dataclasses.replace(rule_arms.CASES["muon"], ours=wrong)
    attach = functools.partial(rule_arms._attach, "muon", case, "fp32")
    monkeypatch.setitem(arms.ARMS, "changed", dataclasses.replace(arms.get("forge-muon"), attach=attach))
    assert parity.parity("changed", "llama", "cpu")["passed"] is not bool(wrong)


def test_a_references_states_are_fp32_beside_bf16_weights():
    p = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    twin = torch.nn.Parameter(p.detach().float())
    optimizer = references.Fp32States([("p", p)], lambda name, copy: torch.optim.Adam([copy], lr=1e-2))
    plain = torch.optim.Adam([twin], lr=1e-2)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        twin.grad = p.grad.float()
        optimizer.step()
        plain.step()
        # Only the weight is rounded, after each step.
        assert torch.equal(p, twin.to(torch.bfloat16))
        with torch.no_grad():
            twin.copy_(p)
    [(_, copy, inner)] = optimizer._steps
    assert inner.state[copy]["exp_avg"].dtype is torch.float32
    assert copy.numel() == 0


def test_every_committed_bench_can_be_read_and_names_known_arms():
    files = sorted(spec.BENCHES.glob("*.yaml"))
    assert files
    for file in files:
        bench = spec.load(str(file), [])
        assert bench_main.refuse(dataclasses.replace(bench, liger=[False]), rehearse=True) is None
        assert all(arms.get(name).against or bench.baseline in bench.arms for name in bench.arms)


def test_what_cannot_run_is_refused(capsys):
    with pytest.raises(config.RecipeError, match="steps: 1 has no quartiles; time at least 2"):
        spec.load("rules", ["steps=1"])
    with pytest.raises(config.RecipeError, match="did you mean steps"):
        spec.load("llama3_8b", ["step=3"])
    assert bench_main.main(["llama3_8b", "--fork", "arms=[adamw]"]) == bench_main.IMPOSSIBLE
    assert "there is no arm 'adamw'; there are: adamw-foreach" in capsys.readouterr().err
    assert bench_main.main(["llama3_8b", "shapes=[llama]"]) == bench_main.IMPOSSIBLE
    assert "there is no shape 'llama'; there are: tiny-llama" in capsys.readouterr().err
    assert bench_main.main(["llama3_8b", "arms=[ddp-fused]"]) == bench_main.IMPOSSIBLE
    assert "ddp-fused needs ranks, and world_size=1" in capsys.readouterr().err
    assert bench_main.main(["llama3_8b", "--rehearse"]) == bench_main.IMPOSSIBLE
    assert "--rehearse needs --out" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_left_out_by_name(monkeypatch):
    def attach(model, settings):
        import no_such_package  # noqa: F401

    monkeypatch.setitem(arms.ARMS, "absent", Arm(attach, package="some-peer"))
    bench = spec.load("llama3_8b", TINY)
    order = spec.order(bench, spec.Cell("tiny-llama", "absent", 1, 16), "cpu")
    assert cell.answer_to(order, "cpu")["left_out"].startswith("some-peer is not installed (No module named")


def test_the_arms_of_a_cell_run_beside_each_other():
    overrides = ["shapes=[gpt2]", "arms=[ddp-fused,fsdp2-fused]", "bucket_mb=[1,4]", "batch=[1]", "sequence=[512,2048]"]
    keys = [one.key for one in spec.cells(spec.load("data_parallel", overrides), arms.BUCKETED)]
    of_one = ["ddp-fused/1MB/r0", "ddp-fused/4MB/r0", "fsdp2-fused/r0"]
    assert keys == [f"gpt2/b1/s{length}/{arm}" for length in (512, 2048) for arm in of_one]


@pytest.mark.parametrize("kind", [processes.Spawned, processes.Forked])
def test_a_cell_that_takes_too_long_is_ended_and_written_down(kind):
    run, bench = kind(), dataclasses.replace(spec.load("llama3_8b", TINY), timeout_s=0.1)
    answer = run.run(spec.order(bench, spec.Cell("tiny-llama", "forge", 1, 16), "cpu"))
    run.close()
    assert answer["failed"] == "no answer in 0.1 s"
    assert report.line(answer) == "tiny-llama/b1/s16/forge/r0: failed: no answer in 0.1 s"


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A bench from the command line to its files, on the CPU."""
    out = tmp_path_factory.mktemp("bench") / "out.json"
    chosen = [*TINY, "checkpointing=[false,true]", "arms=[muon-stored,muon-fused]", "baseline=muon-stored"]
    arguments = ["muon", *chosen, "--rehearse", "--fork", "--out", str(out)]
    assert bench_main.main(arguments) == 0
    return arguments, out


def test_a_rehearsal_fills_its_file_and_is_continued(rehearsed, monkeypatch):
    arguments, out = rehearsed
    log = json.loads(out.read_text())
    assert list(log["cells"]) == [
        f"tiny-llama/b1/s16{how}/{arm}/r0" for how in ("", "/checkpointing") for arm in ("muon-stored", "muon-fused")
    ]
    assert out.with_suffix(".png").stat().st_size > 1000
    assert {"source_sha256", "versions"} <= log["provenance"].keys()
    monkeypatch.setattr(bench_main.Forked, "run", lambda *_: pytest.fail("a cell was measured again"))
    assert bench_main.main(arguments) == 0


def test_the_bytes_that_fall_at_the_end_of_backward_are_the_owned_weights(rehearsed):
    """Muon's gradients, and those of AdamW's embedding and head, measured live."""
    log = json.loads(rehearsed[1].read_text())
    for row in report.merged(log).values():
        stored, fused = row["muon-stored"], row["muon-fused"]
        removed = report.end_of_backward(stored) - report.end_of_backward(fused)
        owned = fused["owned_weight_bytes"]
        assert owned > 0.95 * stored["pools"]["weights"]
        assert removed == pytest.approx(owned, rel=0.05)
        assert stored["pools"]["gradients"] - fused["pools"]["gradients"] == owned
        assert fused["pools"]["states"] == pytest.approx(stored["pools"]["states"], rel=0.02)
        # States aside, it is the gradient pool to the last percent, and the table says so.
        live, governed, same = report.removed(row, "muon-fused")
        assert (governed, same) == (owned, True)
        assert live == pytest.approx(owned, rel=report.SCRATCH)
        assert report.removed(row, "muon-stored") is None
        kept = {**fused, "pools": {**fused["pools"], "gradients": 4}}
        assert not report.removed({**row, "muon-fused": kept}, "muon-fused")[2]
        late = {**fused, "held": fused["held"] + owned // 50}
        assert not report.removed({**row, "muon-fused": late}, "muon-fused")[2]
    assert report.table(log).columns[7].header == "removed"
    assert [" = " in said for said in report.table(log).columns[7].cells] == [False, True] * 2


def test_in_the_committed_ladder_of_muon_the_missing_gradients_are_those_of_the_owned_weights():
    """To the byte; the allocator's blocks, which are larger than their tensors, to a percent from 4B on."""
    files = (spec.BENCHES / "results" / f"h200_muon{name}.json" for name in ("", "_0p6b_1p7b"))
    rows = {place: row for file in files for place, row in report.merged(json.loads(file.read_text())).items()}
    assert sorted(place.split("/")[0] for place in rows) == sorted(2 * [f"qwen3-{n}b" for n in ("0.6", "1.7", 4, 8)])
    for place, row in rows.items():
        for end in ("", "-captured") if "muon-fused-captured" in row else ("",):
            stored, fused = row["muon-stored" + end], row["muon-fused" + end]
            assert stored["pools"]["gradients"] - fused["pools"]["gradients"] == fused["owned_weight_bytes"]
            assert fused["owned_weight_bytes"] > 0.99 * stored["pools"]["weights"]
        assert report.removed(row, "muon-fused")[2] is place.startswith(("qwen3-4b", "qwen3-8b"))


def log(*answers, **of_bench):
    provenance = {"source_sha256": "1", "versions": {"torch": "2"}, "gpus": [{"name": "a GPU"}]}
    cells = {spec.Cell(**answer["cell"]).key: answer for answer in answers}
    return {"bench": {"baseline": "adamw-fused", **of_bench}, "provenance": provenance, "cells": cells}


def answer(arm, step=None, peak=0, *, against="adamw-fused", sequence=512, bucket=None, run=0, **more):
    made = {
        "cell": dataclasses.asdict(spec.Cell("a", arm, 1, sequence, False, bucket, run)),
        "against": against,
        **more,
    }
    if step is not None:
        made |= {"ms": {"step": step}, "peak_bytes": peak, "parity": {"distance": 1e-6, "kind": "llama"}}
    return made


def test_ratios_are_to_the_baseline_of_the_same_cell(tmp_path):
    made = log(
        answer("adamw-fused", 100.0, 4 << 30),
        answer("forge", 60.0, 3 << 30),
        answer("forge", 40.0, 2 << 30, run=1),
        answer("forge", sequence=2048, out_of_memory="CUDA out of memory"),
    )
    row = report.merged(made)["a/b1/s512"]
    assert (row["forge"]["ms"], row["forge"]["peak_bytes"]) == (50.0, 3 << 30)
    assert row["forge"]["spread_ms"] == pytest.approx(14.142, abs=1e-3)
    table = report.table(made)
    assert list(table.columns[3].cells) == ["1.000", "0.500", ""]
    assert list(table.columns[5].cells) == ["1.000", "0.750", ""]
    assert figure.draw([made], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert not figure.draw([log(answer("forge", failed="why"))], tmp_path / "none.png")


def test_an_arm_is_compared_with_its_own_reference_and_bucket():
    made = log(
        answer("ddp-fused", 100.0, 8, against="ddp-fused", bucket=1),
        answer("ddp-fused", 80.0, 8, against="ddp-fused", bucket=4),
        answer("forge-dp", 60.0, 8, against="ddp-fused", bucket=1),
        answer("forge-dp-sr", 60.0, 8, against="ddp-fused"),
    )
    # Without a bucket of its own: the fastest.
    assert list(report.table(made).columns[3].cells) == ["1.000", "1.000", "0.600", "0.750"]


def test_what_is_approximate_is_said_to_be():
    made = answer("forge-galore", 1.0, 8, approximate=True)
    assert list(report.table(log(made, answer("forge", 1.0, 8))).columns[1].cells) == [
        "forge-galore (approximate)",
        "forge",
    ]
    assert report.line(made).endswith("parity 1.0e-06, approximate")


def test_a_peak_is_stacked_of_its_pools():
    pools = {"weights": 2 << 30, "states": 3 << 30, "gradients": 1 << 30}
    row = report.merged(log(answer("forge", 1.0, 8 << 30, pools=pools)))["a/b1/s512"]
    assert figure.stacked(row["forge"]) == {
        "weights": 2.0,
        "states": 3.0,
        "gradients": 1.0,
        "activations, workspaces": 2.0,
    }


def test_one_table_of_several_files_has_the_least_and_the_largest_peak_of_the_ranks(tmp_path, capsys):
    ranks = answer("forge-dp", 50.0, 3 << 30, against="forge-dp", ranks_peak_bytes=[2 << 30, 3 << 30])
    other = answer("forge", 60.0, 4 << 30, sequence=64, against="forge", ranks_peak_bytes=[4 << 30, 4 << 30])
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, one in zip(files, (ranks, other), strict=True):
        file.write_text(json.dumps(log(one, world_size=2)))
    assert bench_main.main(["table", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert said.count("2 × a GPU") == 1
    assert [name in said for name in ("a/b1/s512", "2.00 to 3.00", "a/b1/s64", " 4.00 ")] == [True] * 4
    assert bench_main.main(["table"]) == bench_main.IMPOSSIBLE


def test_results_of_other_sources_are_not_continued(tmp_path):
    out = tmp_path / "out.json"
    out.write_text(json.dumps(log(answer("forge", 1.0, 1), answer("adamw-fused", failed="why"))))
    head = {key: value for key, value in log().items() if key != "cells"}
    # What failed is run again.
    assert [one["cell"]["arm"] for one in bench_main.resume(out, head)["cells"].values()] == ["forge"]
    for changed in ({"bench": {"steps": 3}}, {"provenance": {**head["provenance"], "source_sha256": "2"}}):
        assert bench_main.resume(out, {**head, **changed})["cells"] == {}


def test_the_check_of_an_arm_is_made_once_in_a_file(monkeypatch):
    made = log(answer("forge", 1.0, 1))
    cells = [spec.Cell("tiny-llama", arm, 1, 16) for arm in ("forge", "adamw-fused")]
    assert bench_main.known_parity(made, cells[0]) == {"distance": 1e-6, "kind": "llama"}
    assert bench_main.known_parity(made, cells[1]) is None
    assert bench_main.known_parity(made, dataclasses.replace(cells[0], shape="tiny-qwen3")) is None


def test_the_committed_results_make_a_figure(tmp_path):
    files = sorted((spec.BENCHES / "results").glob("h200_llama3_8b*.json"))
    out = tmp_path / "figure.png"
    chosen = ["--place", "llama-3.1-8b/b1/s512"]
    assert bench_main.main(["figure", *map(str, files), "--out", str(out), *chosen]) == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert bench_main.main(["figure", *map(str, files), "--out", str(out), "--place", "gpt2"]) == bench_main.IMPOSSIBLE
