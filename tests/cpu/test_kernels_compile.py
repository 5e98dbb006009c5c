"""The Triton kernels compile for Hopper on a machine without a GPU, and keep everything in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_every_kernel_compiles_for_sm_90(compiled):
    kernels = {entry["kernel"] for entry in compiled}
    assert kernels == {
        "wgrad_step_kernel",
        "wgrad_norm_kernel",
        "wgrad_accumulate_kernel",
        "multi_tensor_step_kernel",
        "sum_partials_kernel",
    }
    assert len([entry for entry in compiled if entry["kernel"] == "wgrad_step_kernel"]) == 8


def test_no_kernel_spills(compiled):
    assert not [entry for entry in compiled if entry["spilled_bytes"]]


def test_aligned_16_bit_launches_use_the_tensor_cores_and_store_vectors(compiled):
    steps = [e for e in compiled if e["kernel"] == "wgrad_step_kernel" and not e["launch"].startswith("fp32")]
    assert all(entry["wgmma"] for entry in steps)
    whole = [entry for entry in steps if not entry["launch"].endswith("odd")]
    whole += [e for e in compiled if e["kernel"] == "multi_tensor_step_kernel" and e["launch"].endswith("4096")]
    assert len(whole) == 6
    assert all(entry["vector_stores"] for entry in whole)
