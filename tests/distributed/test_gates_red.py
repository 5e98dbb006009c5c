"""A gate goes red when what it guards breaks, and its exit code and the launcher's refusal follow."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gates.gate import Reading
from gates.receipt import ROOT
from tests.distributed import as_torchrun


@pytest.mark.parametrize("gates", ["TP", "SP1", "MG", "F1 F2 F3 MW", "T0 T1 T2 SR", "PP1", "CP1", "EP1"])
def test_a_gate_sees_each_thing_that_it_guards_break(tmp_path, gates):
    from tests.distributed.gate_breaks import BREAKS

    output, module = tmp_path / "output", "tests.distributed.gate_breaks"
    assert as_torchrun.run(2, module, str(tmp_path), *gates.split(), output=output) == 0, output.read_text()
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert set(answers) == set(gates.split())
    for gate, measured in answers.items():
        red = {name: {r["what"] for r in readings if not Reading(**r).passed} for name, readings in measured.items()}
        assert red.pop("") == red.pop("again") == set(), f"{gate}: green before, and green again after"
        missed = {broken.__name__: what for broken, what in BREAKS[gate].items() if what not in red[broken.__name__]}
        assert not missed, f"{gate}: not seen: {missed}; red was {red}"
        assert len(red) == len(BREAKS[gate])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, for a break that every process has, the command's own too."""
    for package in ("forge_megatron", "launch", "gates"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def gates(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gates", *arguments, "--device", "cpu"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


def test_a_wrong_rule_is_exit_1_and_the_launcher_is_refused_with_the_reason(copy):
    rule = copy / "forge_megatron/rules/fused/adamw.py"
    text = rule.read_text()
    assert "w * decay" in text
    rule.write_text(text.replace("w * decay", "w * (2.0 - decay)"))
    done = gates(copy, "TP", "--nproc", "2", "--dtype", "fp32")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL" in done.stdout
    refused = gates(copy, "--tp", "2", "--ensure")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert re.search(r"gate TP tp2 fp32 cpu is red: ΔW, in backward \S+, bound 1.19e-07", refused.stdout)
    rule.write_text(text)
    refused = gates(copy, "--tp", "2", "--ensure")
    assert refused.returncode == 3
    assert "stale, changed since" in refused.stdout
    assert "forge_megatron/rules/fused/adamw.py" in refused.stdout


def test_a_rank_that_crashes_is_exit_1_with_its_error(copy):
    with open(copy / "forge_megatron/megatron/function.py", "a") as file:
        file.write("\nraise RuntimeError('a rank that cannot start')\n")
    done = gates(copy, "TP", "--nproc", "2", "--dtype", "fp32")
    assert done.returncode == 1
    entry = json.loads((copy / ".gates/receipt.json").read_text())["entries"]["TP tp2 fp32 cpu"]
    assert entry["failure"] == "RuntimeError: a rank that cannot start"
    assert not entry["passed"]
    assert "Traceback" in done.stderr
