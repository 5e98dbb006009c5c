"""A gate sees what it guards break. Each test breaks a copy of the sources and runs ``python -m gates`` there.

The break is a few lines appended to a file of the copy, so that every rank has it, and the exit code is the command's.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gates.receipt import ROOT

NO_REDUCTION = """
import types
_done = types.SimpleNamespace(wait=lambda: None)
dist = types.SimpleNamespace(**{**vars(dist), "all_reduce": lambda tensor, **_: _done})
"""
# Each rank's own tokens, as often as there are ranks, in the place of everybody's.
NO_GATHER = """
def _gather_sequence(shard, group, *, shared, async_op=False):
    import types
    return torch.cat([shard] * group.size()), types.SimpleNamespace(wait=lambda: None)
"""
NO_SCATTER = """
import types
def _own_part(out, whole, group, async_op):
    out.copy_(whole.chunk(group.size())[group.rank()])
    return types.SimpleNamespace(wait=lambda: None)
dist = types.SimpleNamespace(**{**vars(dist), "reduce_scatter_tensor": _own_part})
"""
# The gathered X of a waiting weight left in the buffer that the next layer gathers into.
REUSED_BUFFER = """
_gather = _gather_sequence
def _gather_sequence(shard, group, *, shared, async_op=False):
    return _gather(shard, group, shared=True, async_op=async_op)
"""
STALE_WEIGHT = """
_first = {}
Use.weight = property(lambda use: _first.setdefault(id(use.owned), use.owned.weight.detach().clone()))
"""
UPDATED_TOO_EARLY = """
import torch.autograd.graph
_begin = Use.begin
def begin(use):
    use.owned.weight.data.mul_(1.001)
    return _begin(use)
Use.begin = begin
"""
PARTED_RANK = """
_step = ForgeOptimizer.step
def step(self, *args, **kwargs):
    import os
    loss = _step(self, *args, **kwargs)
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            self.param_groups[0]["params"][-1].mul_(1 + 2e-7)
    return loss
ForgeOptimizer.step = step
"""
NO_DECAY = """
_scalars = scalars
def scalars(group, step):
    return (1.0, *_scalars(group, step)[1:])
object.__setattr__(__import__("forge_megatron.rules", fromlist=["get"]).get("adamw"), "scalars", scalars)
"""
TWICE_THE_GRADIENT = """
_deliver = Use.deliver
Use.deliver = lambda use, dy, x, **kwargs: _deliver(use, 2 * dy, x, **kwargs)
"""
NO_CLIPPING = """
ForgeMegatronOptimizer.set_total_norm = lambda self, norm: None
"""
LATE_SCHEDULE = """
_scalars, _lr = scalars, {}
def scalars(group, step):
    _lr[id(group), step] = group["lr"]
    return _scalars({**group, "lr": _lr.get((id(group), step - 1), group["lr"])}, step)
object.__setattr__(__import__("forge_megatron.rules", fromlist=["get"]).get("adamw"), "scalars", scalars)
"""
NOT_A_NUMBER = """
_apply = OwnedParallelLinearFunction.forward
OwnedParallelLinearFunction.forward = staticmethod(lambda *a: _apply(*a) * float("nan"))
"""
CRASH = """
raise RuntimeError("a rank that cannot start")
"""
NOTHING_OWNED = """
def convert(model):
    model = unwrap(model)
    setattr(model, _ATTRIBUTE, Conversion({}, {}))
    return conversion_of(model)
"""

FUNCTION = "forge_megatron/megatron/function.py"
RULE = "forge_megatron/rules/fused/adamw.py"
OWNED = "forge_megatron/linear/owned.py"
OPTIMIZER = "forge_megatron/optimizer.py"
MEGATRON = "forge_megatron/megatron/optimizer.py"

BREAKS = {
    "TP: input gradient not reduced": ("TP", FUNCTION, NO_REDUCTION, "ΔW"),
    "TP: stale weight": ("TP", OWNED, STALE_WEIGHT, "ΔW"),
    "TP: input gradient from a changed weight": ("TP", OWNED, UPDATED_TOO_EARLY, "ΔW"),
    "TP: a rank parts": ("TP", OPTIMIZER, PARTED_RANK, "difference between ranks"),
    "TP: no decay": ("TP", RULE, NO_DECAY, "ΔW"),
    "TP: a factor on the gradient": ("TP", OWNED, TWICE_THE_GRADIENT, "Δstate"),
    "TP: NaN": ("TP", FUNCTION, NOT_A_NUMBER, "ΔW"),
    "TP: crash": ("TP", FUNCTION, CRASH, "RuntimeError: a rank that cannot start"),
    "SP1: X not gathered": ("SP1", FUNCTION, NO_GATHER, "SP-dense ΔW"),
    "SP1: input gradient not reduced": ("SP1", FUNCTION, NO_SCATTER, "SP-dense ΔW"),
    "SP1: kept X overwritten": ("SP1", FUNCTION, REUSED_BUFFER, "SP-dense ΔW, waiting"),
    "MG: no decay": ("MG", RULE, NO_DECAY, "loss gap"),
    "MG: no clipping": ("MG", MEGATRON, NO_CLIPPING, "Δstate, waiting"),
    "MG: learning rate a step late": ("MG", RULE, LATE_SCHEDULE, "loss gap"),
    "MG: a factor on the gradient": ("MG", OWNED, TWICE_THE_GRADIENT, "gradient norm"),
    "MG: input gradient not reduced": ("MG", FUNCTION, NO_SCATTER, "loss gap"),
    "MG: FORGE owns nothing": ("MG", "forge_megatron/megatron/convert.py", NOTHING_OWNED, "FORGE found no weight"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in ("forge_megatron", "launch", "gates"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def gates(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gates", *arguments, "--device", "cpu"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("name", BREAKS)
def test_a_gate_goes_red_when_what_it_guards_breaks(copy, name):
    gate, path, lines, what = BREAKS[name]
    with open(copy / path, "a") as file:
        file.write(lines)
    done = gates(copy, gate, "--nproc", "2", "--dtype", "fp32")
    assert done.returncode == 1, done.stdout + done.stderr
    entries = json.loads((copy / ".gates/receipt.json").read_text())["entries"].values()
    assert not all(entry["passed"] for entry in entries)
    red = [r["what"] for entry in entries for r in entry["readings"] if not r["value"] <= r["bound"]]
    red += [entry["failure"] for entry in entries]
    assert any(what in said for said in red), red


def test_the_launcher_is_refused_with_the_reason_once_a_gate_is_red(copy):
    with open(copy / RULE, "a") as file:
        file.write(NO_DECAY)
    for _ in range(2):
        refused = gates(copy, "--tp", "2", "--ensure")
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert re.search(r"gate TP cpu tp2 fp32 is red: ΔW, in backward \S+, bound 1.19e-07", refused.stdout)
        assert "not started" in refused.stdout
