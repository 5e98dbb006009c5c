"""Runs of the trainer for the tests: two small ranks over gloo, without the launcher's gates.

:meth:`Job.run` starts the ranks itself; :meth:`Job.start` starts torchrun's agent, which starts them.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launch import metrics, preflight
from tests.distributed import as_torchrun

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, num_query_groups: 2}
parallel: {tensor: 2, sequence: true}
data: {train: [DATA/train], valid: [DATA/valid], sequence_length: 32}
batch: {micro: 2, total: 4}
optimizer: {lr: 2e-3, warmup_steps: 2, clip_grad: 0.5}
validation: {samples: 8}
logging: {tensorboard: false}
checkpoint: {self_test: false}
run: {dir: RUN, steps: 6, device: cpu}
"""
# The 0.19 wheel is for Python 3.12; unpacked for another, its core runs and its datasets do not.
NO_INDEX_BUILDER = pytest.mark.skipif(
    preflight.index_builder() is None,
    reason="NOT RUN: megatron-core's dataset index builder is compiled for another Python; see make test-other",
)


def write_data(folder: Path) -> Path:
    """A small indexed dataset of bytes, from this repository's own sources."""
    from launch.prepare import prepare

    prepare(sorted((ROOT / "launch").glob("*.py")), folder, valid_every=5)
    return folder


@dataclass(frozen=True)
class Job:
    """A recipe in a folder of its own, and the ways to run it.

    Attributes:
        module: what :meth:`run` runs in each rank.
    """

    folder: Path
    data: Path
    overrides: tuple[str, ...] = ()
    module: str = "launch.worker"

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"

    def arguments(self, *overrides: str) -> list[str]:
        """Of ``launch.worker``, whose recipe is written."""
        recipe = self.folder / "recipe.yaml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        self.run_folder.mkdir(exist_ok=True)
        recipe.write_text(RECIPE.replace("DATA", str(self.data)).replace("RUN", str(self.run_folder)))
        return [str(recipe), *self.overrides, *overrides]

    def start(self, *overrides: str, ranks: int = 2) -> subprocess.Popen:
        agent = [sys.executable, "-m", "launch.agent", "--nproc-per-node", str(ranks), "--standalone"]
        return subprocess.Popen(
            [*agent, "--local-addr", "127.0.0.1", "-m", "launch.worker", *self.arguments(*overrides)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *overrides: str, ranks: int = 2, code: int = 0) -> str:
        """Run to the end; returns what was printed. ``code`` 1: some rank failed."""
        output = self.folder / "output"
        arguments = self.arguments(*overrides)
        output.write_text("")
        assert as_torchrun.run(ranks, self.module, *arguments, output=output) == code, output.read_text()
        return output.read_text()

    def losses(self) -> dict[int, float]:
        return {record["step"]: record["loss"] for record in metrics.read(self.run_folder, "step")}

    def grad_norms(self) -> dict[int, float]:
        return {record["step"]: record["grad_norm"] for record in metrics.read(self.run_folder, "step")}

    def state(self, step: int) -> dict:
        """A checkpoint's values by key, tensors as bytes: weights, optimizer states, schedule, RNG of every rank."""
        whole = self.folder / f"step_{step}.pt"
        dcp_to_torch_save(self.checkpoints / f"step_{step:08d}", whole)
        state = _plain(torch.load(whole, weights_only=False))
        assert any("exp_avg_sq" in key for key in state)
        assert any(key.startswith("rng") for key in state)
        return state


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.flatten().view(torch.uint8).numpy().tobytes()
    return value.getvalue() if isinstance(value, io.BytesIO) else value
