"""The gates are green here, at the degrees that they are meant for, and the receipt says so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gates import __main__ as cli
from gates.gate import Case
from gates.receipt import ROOT
from tests.distributed import as_torchrun

AT_2 = [
    *(
        "TP tp2 fp32",
        "TP tp2 bf16",
        "SP1 tp2 sp fp32",
        "MG tp2 fp32",
        "MG tp2 bf16",
        "MG tp2 sp fp32",
        "MG tp2 sp bf16",
    ),
    *("T0 dp2 fp32", "T0 dp2 bf16", "T1 dp2 fp32", "T2 dp2 fp32", "F1 dp2 fp32", "F2 dp2 fp32", "F3 dp2 bf16"),
    *("MW dp2 bf16", "SR dp2 bf16", "PP1 pp2 fp32", "CP1 cp2 fp32", "EP1 ep2 dp2 fp32"),
]
#: By the gates that a command names: all of them at once take longer than a test may.
AT_4 = {
    "TP SP1 MG": ["TP tp4 fp32", "SP1 tp4 sp fp32", "MG tp4 fp32", "MG tp4 sp fp32"],
    "T0 T1 T2 F1 F2": ["T0 dp4 fp32", "T1 dp4 fp32", "T2 dp4 fp32", "F1 dp4 fp32", "F2 dp4 fp32"],
    "PP1 CP1 EP1": ["PP1 pp4 fp32", "CP1 cp4 fp32", "EP1 ep4 dp4 fp32"],
}


def expect_green(receipt: Path, wanted: list[str]) -> None:
    entries = json.loads(receipt.read_text())["entries"]
    assert set(entries) == {f"{case} cpu" for case in wanted}
    assert all(entry["passed"] for entry in entries.values())


def from_the_server(cases: list[Case], folder: Path, log: Path, timeout_s: float) -> str:
    """In the place of torchrun."""
    arguments = json.dumps([case.to_dict() for case in cases]), str(folder)
    code = as_torchrun.run(cases[0].degrees.world, "gates.worker", *arguments, output=log, timeout_s=timeout_s)
    return "a rank failed" if code else ""


@pytest.fixture
def run_green(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr("gates.run._torchrun", from_the_server)
    monkeypatch.setattr(cli, "RECEIPT", tmp_path / ".gates/receipt.json")

    def run(wanted: list[str], *arguments: str) -> None:
        assert cli.main([*arguments, "--device", "cpu"]) == 0, "".join(capfd.readouterr())
        expect_green(tmp_path / ".gates/receipt.json", wanted)

    return run


def test_all_gates_are_green_at_two_ranks(run_green):
    run_green(AT_2, "--nproc", "2")


@pytest.mark.parametrize("gates", AT_4)
def test_gates_are_green_at_four_ranks(run_green, gates):
    run_green(AT_4[gates], *gates.split(), "--nproc", "4", "--dtype", "fp32")


def test_the_command_is_green_under_torchrun(tmp_path):
    for package in ("forge_megatron", "launch", "gates"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "gates", "TP", "--nproc", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    expect_green(tmp_path / ".gates/receipt.json", ["TP tp2 fp32", "TP tp2 bf16"])
