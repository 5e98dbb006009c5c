"""The Triton kernels compile for Hopper on a machine without a GPU, and keep everything in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import oracles
import pytest

from forge_megatron.kernels import backend
from forge_megatron.kernels.hopper_config import CONFIGS


def run(script, tmp_path_factory, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return run("compile_kernels.py", tmp_path_factory)


def test_every_kernel_compiles_for_sm_90(compiled):
    kernels = {entry["kernel"] for entry in compiled}
    assert kernels == {
        "wgrad_step_kernel",
        "wgrad_norm_kernel",
        "wgrad_write_kernel",
        "lookup_step_kernel",
        "wgrad_measure_kernel",
        "dense_step_kernel",
        "multi_tensor_step_kernel",
        "sum_partials_kernel",
        "squares_kernel",
        "gram_kernel",
        "judge_kernel",
        "form_kernel",
        "write_kernel",
        "normaliser_kernel",
        "gradient_kernel",
    }
    steps = [entry for entry in compiled if entry["kernel"] == "wgrad_step_kernel"]
    assert len(steps) == 25 + 25


def test_no_kernel_spills(compiled):
    assert not [entry for entry in compiled if entry["spilled_bytes"]]


def test_aligned_16_bit_launches_use_the_tensor_cores_and_store_vectors(compiled):
    # A step from a gradient in memory multiplies nothing.
    steps = [e for e in compiled if e["kernel"] == "wgrad_step_kernel" and "measured" not in e["launch"]]
    steps = [e for e in steps if not e["launch"].startswith("fp32")]
    # Odd shapes with states in blocks have tiles of 32 rows, which wgmma does not.
    assert all(entry["wgmma"] for entry in steps if entry["launch"] not in ("int8-noise odd", "codes-noise odd"))
    norms = [entry for entry in compiled if entry["kernel"] in ("gram_kernel", "form_kernel")]
    assert len(norms) == 2
    assert all(entry["wgmma"] for entry in norms)
    forming = [e for e in compiled if e["kernel"] == "wgrad_measure_kernel" and e["launch"].startswith("formed and")]
    assert {e["launch"].split()[4] for e in forming if e["wgmma"]} == {"adam_mini", "lars", "sm3"}
    whole = [entry for entry in steps if not entry["launch"].endswith("odd")]
    whole += [e for e in compiled if e["kernel"] == "multi_tensor_step_kernel" and e["launch"].endswith("4096")]
    whole += [e for e in compiled if e["kernel"] == "lookup_step_kernel"]
    assert len(whole) == 29
    assert all(entry["vector_stores"] for entry in whole)


def expect_gluon(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backend, "triton_version", backend.triton_version.__wrapped__)
    if not backend.has_gluon():
        pytest.skip("NOT RUN: this Triton's Gluon does not compile the Hopper kernel")


#: Of experts in one tensor, by the configuration with the most registers: two steps, and the forming.
EXPERTS_LAUNCHES = 3


def test_the_hopper_kernel_compiles_and_keeps_everything_in_registers(tmp_path_factory, monkeypatch):
    expect_gluon(monkeypatch)
    compiled = run("compile_hopper.py", tmp_path_factory)
    assert {entry["config"] for entry in compiled} == set(CONFIGS)
    others = len(CONFIGS) - 1
    assert len(compiled) == 10 + 3 * others + 3 * len(CONFIGS) + 2 + EXPERTS_LAUNCHES + others
    assert all(entry["wgmma"] for entry in compiled)
    assert not [entry for entry in compiled if entry["spilled_bytes"]]
    assert max(entry["shared_bytes"] for entry in compiled) <= 232_448


def rules_compiled(kernel, tmp_path_factory):
    compiled = {entry["form"]: entry for entry in run("compile_rules.py", tmp_path_factory, kernel)}
    # Forms that differ in the values of their scalars share a launch.
    assert compiled.keys() == oracles.FORMS.keys() - {"momentum-nesterov", "nadam-decoupled", "radam-decoupled"}
    assert all(entry["wgmma"] for entry in compiled.values())
    return {form: entry["spilled_bytes"] for form, entry in compiled.items() if entry["spilled_bytes"]}


def test_every_rule_compiles_for_sm_90(tmp_path_factory):
    """Three states beside the gradient are a few registers too many."""
    spilled = rules_compiled("portable", tmp_path_factory)
    assert spilled.keys() <= {"adam-amsgrad", "adamw-amsgrad", "rmsprop-both"}
    assert max(spilled.values(), default=0) <= 48


def test_every_rule_compiles_in_the_hopper_kernel(tmp_path_factory, monkeypatch):
    expect_gluon(monkeypatch)
    assert not rules_compiled("hopper", tmp_path_factory)
