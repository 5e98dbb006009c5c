"""README and CONTRIBUTING say what is so: their commands, files, tests, example and table of switches exist."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forge_megatron import rules
from forge_megatron.megatron import switches

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}


def functions(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    }


def test_the_sections_come_in_their_order():
    found = re.findall(r"^## (.+)$", README, re.M)
    wanted = [
        "`make demo`",
        "`make test`",
        "Plain PyTorch",
        "Megatron",
        "What it covers, and its limits",
        "How it works",
        "Measured",
    ]
    assert found == wanted


@pytest.mark.parametrize("name", TEXTS)
def test_each_test_that_is_named_exists(name):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", TEXTS[name])
    assert named or name != "README.md"
    missing = [f"{path}::{test}" for path, test in named if test not in functions(ROOT / path)]
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_each_file_that_is_named_exists(name):
    links = re.findall(r"\]\(([^)#:]+)\)", TEXTS[name])
    paths = re.findall(r"`((?:tests|forge_megatron|gates|launch|recipes|slurm|requirements)/[\w./]*\w)`", TEXTS[name])
    missing = [path for path in links + paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_each_target_of_make_exists(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ((?:test|lint|demo|gates)[\w-]*)", TEXTS[name])) <= targets


def test_the_example_runs():
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "forge.attach" in block)
    assert len([line for line in code.splitlines() if line]) <= 12
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert "0.weight" in out
    assert "fused" in out


def test_the_table_of_switches_is_the_codes():
    shown = re.search(r"<!-- switches -->\n(.*?)\n?<!-- /switches -->", README, re.S)[1]
    assert shown == switches.markdown(), f"put this between the marks:\n{switches.markdown()}"


def rows_of_rules() -> dict[str, list[str]]:
    section = README.partition("### Rules\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "`tests/" in line]
    return {name: row for row in rows if len(row) == 7 for name in re.findall(r"`(\w+)`", row[0])}


def test_the_table_of_rules_lists_what_there_is():
    """Every rule; of regime 1 also each state, and four bytes for each of them in fp32."""
    rows = rows_of_rules()
    assert sorted(rows) == rules.available()
    numbers = {"fused": "1", "split": "2", "deferred": "3", "projected": "projected"}
    for name, (_, regime, states, sizes, *_) in rows.items():
        rule = rules.get(name)
        assert regime == numbers[rule.regime], name
        if rule.regime != "fused" or states == "the same":
            continue
        always = states.split(";")[0]
        assert tuple(re.findall(r"`(\w+)`", always)) == rule.states, name
        assert int(sizes.split(";")[0]) == 4 * len(rule.states), name
        switches = ({"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"centered": True, "momentum": 0.9})
        for switched in switches:
            if switched.keys() <= rule.defaults.keys():
                variant = rule.variant({**rule.defaults, "lr": 1.0, **switched})
                assert all(f"`{state}`" in states for state in variant.states), name
                assert str(4 * len(variant.states)) in sizes.split("; "), name


@pytest.mark.parametrize("name", [name for name in rules.available() if rules.get(name).regime != "fused"])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096)])
def test_the_table_of_rules_counts_what_is_not_of_the_weights_shape_too(name, shape):
    """By what a matrix has with the rule's own defaults; what is one a row or a column is less than a byte."""
    rows = rows_of_rules()
    _, _, states, sizes, *_ = rows[name]
    said = f"{rows['galore'][2]} {states}" if states.startswith("the same") else states
    sizes = rows["galore"][3] if sizes == "the same" else sizes
    rule = rules.get(name)
    group = rule.resolve({"lr": 1.0})
    statistics = rule.statistics(group, torch.Size(shape))
    for kept in (*rule.states, *statistics):
        assert f"`{kept}`" in said or f"`{kept.removeprefix('accumulator')}`" in said, kept
    elements = sum(torch.Size(extents).numel() for extents in statistics.values())
    counted = 4 * len(rule.states) + 4 * elements / torch.Size(shape).numel()
    if rule.regime == "projected":
        known = {"r": group["rank"], "O": shape[0], "I": shape[1], "min": min, "max": max}
        formula = sizes.replace(" r ", " * r ")
        assert counted == pytest.approx(eval(formula, known), abs=1e-5)
    else:
        assert int(sizes.split(";")[0]) <= counted < int(sizes.split(";")[0]) + 0.02
