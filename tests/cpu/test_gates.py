"""Which gates a job needs, what makes a receipt red or stale, and the exit codes. No gate is run here."""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import gates.__main__ as cli
from gates import receipt as receipts
from gates.gate import IDS, Case, Degrees, Reading, Result, get, reduced, required, sweep
from gates.receipt import ROOT, Receipt
from gates.run import run
from gates.worker import _over_ranks
from launch import provenance

GREEN = (Reading("gap", 1e-7, 1e-6),)
CASE = Case("TP", "cpu", "fp32", Degrees(tp=2))


def result(case: Case = CASE, readings=GREEN, failure: str = "") -> Result:
    return Result(case, tuple(readings), 1.0, receipts.device_name(case.device), failure)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A small tree in the place of the packages that are hashed."""
    for package in ("forge_megatron", "launch", "gates"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("value = 1\n")
    real = provenance._folder_of
    monkeypatch.setattr(
        provenance, "_folder_of", lambda name: tmp_path / name if (tmp_path / name).is_dir() else real(name)
    )
    return tmp_path


@pytest.fixture
def command(sources, monkeypatch, capsys):
    """``python -m gates`` with a receipt of its own and chosen results; gives (exit code, output, cases run)."""
    monkeypatch.setattr(cli, "RECEIPT", sources / "receipt.json")

    def call(*argv: str, outcome=GREEN):
        ran = []

        def fake(cases):
            for case in cases:
                ran.append(case)
                yield result(case, outcome)

        monkeypatch.setattr(cli, "run", fake)
        code = cli.main([*argv, "--device", "cpu"])
        return code, "".join(capsys.readouterr()), ran

    return call


def names(cases: list[Case]) -> list[str]:
    return [case.key for case in cases]


# ---- which gates


@pytest.mark.parametrize(
    ("degrees", "how", "needs"),
    [
        (Degrees(), (False, "fp32"), ["MG tp1 fp32 cpu"]),
        (Degrees(tp=2), (False, "fp32"), ["TP tp2 fp32 cpu", "MG tp2 fp32 cpu"]),
        (Degrees(tp=2), (True, "fp32"), ["TP tp2 fp32 cpu", "SP1 tp2 sp fp32 cpu", "MG tp2 sp fp32 cpu"]),
        (
            Degrees(tp=4),
            (True, "bf16"),
            ["TP tp4 fp32 cpu", "TP tp4 bf16 cpu", "SP1 tp4 sp fp32 cpu", "MG tp4 sp fp32 cpu", "MG tp4 sp bf16 cpu"],
        ),
        (Degrees(pp=16), (False, "bf16"), ["MG tp1 fp32 cpu", "MG tp1 bf16 cpu", "PP1 pp8 fp32 cpu"]),
        (Degrees(tp=64), (False, "fp32"), ["TP tp8 fp32 cpu", "MG tp8 fp32 cpu"]),
        (
            Degrees(dp=2),
            (False, "fp32", "states"),
            ["MG tp1 fp32 cpu", "T0 dp2 fp32 cpu", "T1 dp2 fp32 cpu", "T2 dp2 fp32 cpu"],
        ),
        (
            Degrees(dp=64),
            (False, "bf16", "full"),
            [f"MG tp1 {dtype} cpu" for dtype in ("fp32", "bf16")]
            + [f"{gate} cpu" for gate in ("F1 dp8 fp32", "F2 dp8 fp32", "F3 dp8 bf16", "MW dp8 bf16")],
        ),
    ],
)
def test_a_job_needs_the_gates_of_its_degrees(degrees, how, needs):
    sp, dtype, *sharding = how
    assert names(required(degrees, sp, dtype, "cpu", *sharding)) == needs


@pytest.mark.parametrize("degree", [1, 2, 3, 7, 8, 9, 64])
def test_a_degree_is_reduced_to_8_ranks_and_stays_above_1(degree):
    assert reduced(degree) <= 8
    assert (reduced(degree) > 1) == (degree > 1)


def test_the_sweep_runs_every_gate_at_every_degree_and_dtype():
    cases = sweep(["TP", "SP1", "MG"], [2, 4], "cpu")
    assert len(set(cases)) == len(cases) == 2 * (2 + 1 + 4)
    assert {(c.gate, c.degrees.tp) for c in cases} == {(g, n) for g in ("TP", "SP1", "MG") for n in (2, 4)}
    assert names(sweep(["MG", "TP"], [1], "cpu")) == ["MG tp1 fp32 cpu", "MG tp1 bf16 cpu"]


@pytest.mark.parametrize("gate_id", IDS)
def test_a_gate_is_one_file_that_says_what_it_compares(gate_id):
    assert (ROOT / "gates" / f"{gate_id.lower()}.py").is_file()
    assert get(gate_id).id == gate_id
    assert "against" in get(gate_id).compares


# ---- a reading


@pytest.mark.parametrize(
    ("value", "passed"), [(0.0, True), (1e-6, True), (1.1e-6, False), (math.nan, False), (math.inf, False)]
)
def test_a_reading_passes_up_to_its_bound_and_never_as_nan(value, passed):
    assert Reading("gap", value, 1e-6).passed is passed


def test_no_readings_is_not_a_pass():
    assert not result(readings=()).passed
    assert not result(failure="a rank failed").passed


def test_the_worst_rank_counts(monkeypatch):
    per_rank = [[Reading("a", 1.0, 2.0), Reading("b", 5.0, 2.0)], [Reading("a", math.nan, 2.0), Reading("b", 3.0, 2.0)]]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda out, mine: out.__setitem__(slice(None), per_rank)
    )
    a, b = _over_ranks(per_rank[0])
    assert math.isnan(a.value)
    assert b.value == 5.0


# ---- the command


def test_green_writes_a_receipt_and_exits_0(command, sources):
    code, out, ran = command("TP", "--nproc", "2")
    assert code == 0
    assert names(ran) == ["TP tp2 fp32 cpu", "TP tp2 bf16 cpu"]
    assert re.search(r"1\.00e-07.*1\.00e-06.*gap.*pass", out), "the number and its bound are printed"
    entry = json.loads((sources / "receipt.json").read_text())["entries"]["TP tp2 fp32 cpu"]
    assert entry["world_size"] == 2
    assert entry["device"].startswith("cpu")
    assert entry["case"]["degrees"]["tp"] == 2
    assert set(entry["versions"]) >= {"python", "torch", "triton", "megatron-core"}
    assert len(entry["code"]) == 64
    assert entry["readings"] == [{"what": "gap", "value": 1e-7, "bound": 1e-6}]
    assert entry["at"]


@pytest.mark.parametrize("readings", [(Reading("gap", 2e-6, 1e-6),), (Reading("gap", math.nan, 1e-6),), ()])
def test_red_exits_1(command, readings):
    assert command("TP", outcome=readings)[0] == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["XX"], "no gate is called XX"),
        (["--nproc", "9"], "between 1 and 8"),
        (["TP", "--nproc", "1"], "nothing for 1 processes"),
        (["--ensure"], "give its degrees too"),
        (["--tp", "2", "TP"], "no ID"),
        (["--tp", "1", "--sp"], "no parallel layout"),
        (["--dp", "0"], "no parallel layout: dp 0: below 1"),
        (["--ep", "4", "--dp", "2"], "ep 4 does not divide dp 2 x cp 1"),
        (["--tp", "2", "--sharding", "full"], "nothing to shard over: give --dp"),
    ],
)
def test_what_cannot_be_run_is_said_and_exits_2_or_3(command, argv, says):
    code, out, ran = command(*argv)
    assert code == (3 if "--ensure" in argv else 2)
    assert says in out
    assert not ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "gates", "TP", "--device", "cuda"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "2 ranks need as many GPUs, and this machine has 0" in done.stderr


# ---- what the launcher asks


def test_ensure_runs_what_is_missing_and_then_nothing(command):
    job = ("--tp", "2", "--sp", "--ensure")
    code, _, ran = command(*job)
    assert code == 0
    assert names(ran) == ["TP tp2 fp32 cpu", "SP1 tp2 sp fp32 cpu", "MG tp2 sp fp32 cpu"]
    code, _, ran = command(*job)
    assert (code, ran) == (0, [])
    code, _, ran = command("--tp", "4", "--sp", "--ensure")
    assert code == 0
    assert {case.degrees.tp for case in ran} == {4}, "a receipt at another degree does not cover the job"
    _, _, ran = command("--tp", "2", "--sp", "--dtype", "bf16", "--ensure")
    assert {case.dtype for case in ran} == {"bf16"}


def test_ensure_refuses_a_gate_that_was_red_when_it_ran_for_this_job(command):
    code, out, _ = command("--tp", "2", "--ensure", outcome=(Reading("gap", 2e-6, 1e-6),))
    assert code == 3
    assert "TP tp2 fp32 cpu is red: gap 2e-06, bound 1e-06" in out


def test_ensure_refuses_a_red_entry_without_running_it_again(command):
    command("TP", "--nproc", "2", outcome=(Reading("gap", 2e-6, 1e-6),))
    code, out, ran = command("--tp", "2", "--ensure")
    assert (code, ran) == (3, [])
    assert "red: gap 2e-06, bound 1e-06" in out
    assert "python -m gates --device cpu --tp 2 --dtype fp32" in out
    assert command("--tp", "2")[0] == 0, "the command that it names runs the job's gates again"
    assert command("--tp", "2", "--ensure")[0] == 0


@pytest.mark.parametrize("package", ["forge_megatron", "launch", "gates"])
def test_one_changed_byte_makes_the_receipt_stale(command, sources, package):
    command("--tp", "2", "--ensure")
    path = sources / package / "__init__.py"
    path.write_text(path.read_text().replace("1", "2"))
    code, out, ran = command("--tp", "2", "--ensure")
    assert (code, ran) == (3, [])
    assert "stale, changed since" in out
    assert f"{package}/__init__.py" in out
    path.write_text(path.read_text().replace("2", "1"))
    assert command("--tp", "2", "--ensure")[0] == 0, "the same bytes again are the same code"


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_a_file_that_comes_or_goes_makes_the_receipt_stale(command, sources, change):
    (sources / "launch" / "a.py").write_text("")
    command("--tp", "2", "--ensure")
    if change == "added":
        (sources / "launch" / "b.py").write_text("")
    elif change == "removed":
        (sources / "launch" / "a.py").unlink()
    else:
        (sources / "launch" / "a.py").rename(sources / "launch" / "b.py")
    assert command("--tp", "2", "--ensure")[0] == 3


@pytest.mark.parametrize("name", ["python", "torch", "triton", "megatron-core", "cuda"])
def test_another_version_makes_the_receipt_stale(command, monkeypatch, name):
    command("--tp", "2", "--ensure")
    now = {**receipts.versions(), name: "0.0.0"}
    monkeypatch.setattr(receipts, "versions", lambda: now)
    code, out, _ = command("--tp", "2", "--ensure")
    assert code == 3
    assert f"{name} " in out
    assert "-> 0.0.0" in out


def test_another_device_makes_the_receipt_stale(command, monkeypatch):
    command("--tp", "2", "--ensure")
    monkeypatch.setattr(receipts, "device_name", lambda device: "another GPU")
    code, out, _ = command("--tp", "2", "--ensure")
    assert code == 3
    assert "-> another GPU" in out


def test_a_cpu_receipt_does_not_cover_a_gpu(sources):
    book = Receipt(sources / "receipt.json")
    book.add(result())
    assert book.covers(CASE)
    assert not book.covers(replace(CASE, device="cuda"))


def test_a_broken_receipt_is_refused_and_not_replaced(command, sources):
    (sources / "receipt.json").write_text("{")
    code, out, ran = command("--tp", "2", "--ensure")
    assert (code, ran) == (3, [])
    assert "is not a receipt" in out
    (sources / "receipt.json").write_text('{"schema": 0, "entries": {}, "sources": {}}')
    assert "schema 0" in command("--tp", "2", "--ensure")[1]


def test_a_receipt_with_half_an_entry_is_refused(command, sources):
    command("TP", "--nproc", "2")
    path = sources / "receipt.json"
    book = json.loads(path.read_text())
    del book["entries"]["TP tp2 fp32 cpu"]["versions"]
    path.write_text(json.dumps(book))
    with pytest.raises(ValueError, match="TP tp2 fp32 cpu has no versions: delete it"):
        Receipt(path)


def test_two_processes_add_to_one_receipt(sources):
    first, second = Receipt(sources / "receipt.json"), Receipt(sources / "receipt.json")
    first.add(result(CASE))
    second.add(result(replace(CASE, degrees=Degrees(tp=4))))
    assert set(Receipt(sources / "receipt.json").entries) == {"TP tp2 fp32 cpu", "TP tp4 fp32 cpu"}
    assert not list(sources.glob("*.tmp"))


def test_the_version_is_that_of_the_megatron_that_is_imported(tmp_path):
    """And not the installed one's, nor with the commit of the repository around it, which 0.19 appends."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("__version__ = '0.17.3+abc1234'\n")
    code = "from launch.provenance import versions; print(versions()['megatron-core'])"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "0.17.3"


def test_the_version_of_what_is_absent_is_none():
    code = (
        "import sys, importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'megatron' else find(name)\n"
        "from launch.provenance import versions; print(versions()['megatron-core'])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "none"


# ---- processes


def test_ranks_that_fail_are_red_with_their_error_and_the_next_case_gets_new_ones(monkeypatch, tmp_path, capfd):
    worker(tmp_path, "raise RuntimeError('the ranks are broken')")
    monkeypatch.setattr("gates.run.ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    first, second = run([CASE, replace(CASE, dtype="bf16")], timeout_s=60)
    assert not first.passed
    assert not second.passed
    assert "torchrun's exit code 1" in first.failure
    assert "RuntimeError: the ranks are broken" in capfd.readouterr().err


def test_a_hang_is_killed_and_red(monkeypatch, tmp_path):
    pids = [tmp_path / f"pid{rank}" for rank in range(2)]

    class Popen(subprocess.Popen):
        """Its time begins when both ranks hang: to start them takes as long as the machine is busy."""

        def wait(self, timeout=None):
            while self.poll() is None and not all(pid.exists() and pid.read_text() for pid in pids):
                time.sleep(0.05)
            return super().wait(timeout)

    name = f"pathlib.Path({str(tmp_path)!r}, 'pid' + os.environ['RANK'])"
    worker(tmp_path, f"import os, pathlib, time; {name}.write_text(str(os.getpid())); time.sleep(300)")
    monkeypatch.setattr("gates.run.ROOT", tmp_path)
    monkeypatch.setattr("gates.run.subprocess.Popen", Popen)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (hung,) = run([CASE], timeout_s=1)
    assert not hung.passed
    assert hung.failure == "no answer in 1 s"
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def worker(root, code: str) -> None:
    """Another gates.worker, for torchrun to start from ``root``."""
    (root / "gates").mkdir()
    (root / "gates" / "__init__.py").write_text("")
    (root / "gates" / "worker.py").write_text(code + "\n")


@pytest.mark.parametrize(("there", "processes"), [(0, [2]), (1, [1]), (2, [2]), (8, [2])])
def test_a_bare_command_on_one_gpu_asks_for_one(monkeypatch, there, processes):
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    assert cli.degrees("cuda") == processes
    assert cli.degrees("cpu") == [2, 4]
