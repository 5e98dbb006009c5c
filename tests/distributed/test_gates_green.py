"""The gates are green here, at the degrees that they are meant for, and the receipt says so."""

import json
import shutil
import subprocess
import sys

import pytest

from gates.receipt import ROOT

SWEEPS = {
    2: ["TP fp32", "TP bf16", "SP1 sp fp32", "MG fp32", "MG bf16", "MG sp fp32", "MG sp bf16"],
    4: ["TP fp32", "SP1 sp fp32", "MG fp32", "MG sp fp32"],
}
DATA_PARALLEL = {
    2: ["T0 fp32", "T0 bf16", "T1 fp32", "T2 fp32", "F1 fp32", "F2 fp32", "F3 bf16", "MW bf16", "SR bf16"],
    4: ["T0 fp32", "T1 fp32", "T2 fp32", "F1 fp32", "F2 fp32"],
}
PIPELINE = {2: ["PP1 fp32"], 4: ["PP1 fp32"]}
CONTEXT = {2: ["CP1 fp32"], 4: ["CP1 fp32"]}


@pytest.mark.parametrize("nproc", SWEEPS)
def test_all_gates_are_green(tmp_path, nproc):
    for package in ("forge_megatron", "launch", "gates"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    dtype = [] if nproc == 2 else ["--dtype", "fp32"]
    command = [sys.executable, "-m", "gates", "--nproc", str(nproc), "--device", "cpu", *dtype]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((tmp_path / ".gates/receipt.json").read_text())["entries"]
    wanted = {f"{name.replace(' ', f' tp{nproc} ', 1)} cpu" for name in SWEEPS[nproc]}
    wanted |= {f"{name.replace(' ', f' dp{nproc} ', 1)} cpu" for name in DATA_PARALLEL[nproc]}
    wanted |= {f"{name.replace(' ', f' pp{nproc} ', 1)} cpu" for name in PIPELINE[nproc]}
    wanted |= {f"{name.replace(' ', f' cp{nproc} ', 1)} cpu" for name in CONTEXT[nproc]}
    wanted.add(f"EP1 ep{nproc} dp{nproc} fp32 cpu")
    assert set(entries) == wanted
    assert all(entry["passed"] for entry in entries.values())
