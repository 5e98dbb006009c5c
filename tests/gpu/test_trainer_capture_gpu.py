"""The trainer's step as a CUDA graph has the bits of the trainer's step that is none: losses, norms, checkpoints."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.core import package_info
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

from launch import metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
model: {num_layers: 2, hidden_size: 256, ffn_hidden_size: 512, num_attention_heads: 4, num_query_groups: 2, dtype: bf16,
        vocab_size: 512, bias: true, transformer_engine: never, tied_head: true}
data: {synthetic: true, sequence_length: 128}
batch: {micro: 2, total: 4}
optimizer: {lr: 2e-3, warmup_steps: 2, recipe: fp32-master, clip_grad: 0.5}
validation: {samples: 8, every: 4}
logging: {tensorboard: false}
checkpoint: {self_test: false, every: 6, keep: 9}
run: {dir: RUN, steps: 10, device: cuda}
"""
# Flash attention adds up a gradient in any order: no two runs of it have the same bits, captured or not.
WORKER = """
import sys, torch
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
from launch import worker
sys.exit(worker.main(sys.argv[1:]))
"""
# Before 0.19 Megatron asks the device for the number of tokens.
PER_TOKEN = () if package_info.__version__.startswith("0.16") else ("batch.per_token_loss=true",)
ARMS = {
    "clipped, two micro-batches, dropout": ("model.dropout=0.1",),
    "divided by the tokens, fused head": (*PER_TOKEN, "optimizer.fused_head=true"),
    "in backward": ("optimizer.recipe=bf16-state", "optimizer.clip_grad=0", "batch.micro=4"),
    "rounded stochastically, in backward": ("optimizer.recipe=sr-store", "optimizer.clip_grad=0", "batch.micro=4"),
    "fp32, recomputed": ("model.dtype=fp32", "optimizer.recipe=fp32-state", "model.recompute=full"),
}


def start(folder, *overrides):
    """One rank, without the launcher's gates."""
    recipe = folder / "recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    recipe.write_text(RECIPE.replace("RUN", str(folder / "run")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(recipe), *overrides],
        cwd=ROOT,
        env={**environment, "WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    """What it printed last; None if it trained."""
    said = process.communicate(timeout=300)[0]
    return said[-4000:] if process.returncode else None


def told(folder):
    """What the run's log says of steps and validations, without times and memory."""
    names = ("step", "loss", "grad_norm", "lr", "valid_loss")
    records = [*metrics.read(folder / "run", "step"), *metrics.read(folder / "run", "valid")]
    return [[record.get(name) for name in names] for record in records]


def saved(folder, step):
    """A checkpoint's values: weights, optimizer states, schedule, random states."""
    whole = folder / f"step_{step}.pt"
    dcp_to_torch_save(folder / "run" / "checkpoints" / f"step_{step:08d}", whole)
    return torch.load(whole, weights_only=False)


def plain(value):
    return value.getvalue() if hasattr(value, "getvalue") else value


def expect_equal(first, second):
    values, structure = tree_flatten(first)
    others, other_structure = tree_flatten(second)
    assert structure == other_structure
    assert any(torch.is_tensor(value) and value.is_floating_point() for value in values)
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other) if torch.is_tensor(value) else plain(value) == plain(other)


@pytest.mark.parametrize("arm", ARMS)
def test_bit_equal_to_a_run_that_is_not_captured(arm, tmp_path):
    """Ten steps, of which three run as they are and seven are replayed, with validation and checkpoints between."""
    eager, captured = tmp_path / "eager", tmp_path / "captured"
    started = start(eager, *ARMS[arm]), start(captured, *ARMS[arm], "run.capture=true")
    failures = [end(process) for process in started]
    assert failures == [None, None], "\n".join(filter(None, failures))
    assert len(told(eager)) == 10 + 3
    assert told(captured) == told(eager)
    for step in (6, 10):
        expect_equal(saved(captured, step), saved(eager, step))


def test_a_captured_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    """It is captured anew, and dropout goes on where it was."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    how = ("model.dropout=0.1", "run.capture=true")
    failure = end(start(straight, *how))
    assert failure is None, failure
    checkpoints = resumed / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copytree(straight / "run" / "checkpoints" / "step_00000006", checkpoints / "step_00000006")
    failure = end(start(resumed, *how))
    assert failure is None, failure
    assert told(resumed) == [record for record in told(straight) if record[0] > 6]
    expect_equal(saved(resumed, 10), saved(straight, 10))
