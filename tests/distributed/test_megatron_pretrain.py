"""Megatron-LM's own loop, ``megatron.training.pretrain`` of 0.19, with and without ``--use-forge``, at TP 2 over gloo.

``megatron.training`` needs Python 3.12. An interpreter of another environment can be named in
``FORGE_MEGATRON_TRAINING_PYTHON``; where there is none, this file's tests are left out and say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("megatron_pretrain.py")
ROOT = SCRIPT.parents[2]
STEPS = 20
ARGUMENTS = shlex.split("""
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --min-lr 0 --lr-decay-style cosine --lr-warmup-iters 2
--weight-decay 0.1 --tensor-model-parallel-size 2 --sequence-parallel --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 32 --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
--distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --eval-interval 1000
--log-interval 1 --untie-embeddings-and-output-weights --no-persist-layer-norm --dataloader-type single
--num-workers 0 --calculate-per-token-loss --ckpt-format torch_dist --lr-decay-iters 20
""")


def _python() -> str | None:
    named = os.environ.get("FORGE_MEGATRON_TRAINING_PYTHON")
    if named:
        return named
    here = sys.version_info >= (3, 12) and importlib.util.find_spec("megatron.training") is not None
    return sys.executable if here else None


needs_training = pytest.mark.skipif(
    _python() is None,
    reason="megatron.training of megatron-core 0.19 needs Python 3.12: run in such an environment, or name its "
    "interpreter in FORGE_MEGATRON_TRAINING_PYTHON",
)


def _pretrain(result: Path, *arguments: str, refused: bool = False, connections: str = "1") -> dict | str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
    }
    command = [_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(result), *ARGUMENTS, *arguments],
        env=environment,
        cwd=result.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    if refused:
        assert done.returncode != 0
        return done.stderr + done.stdout
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(result.read_text())


def _gap(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@needs_training
def test_pretrain_with_forge_is_pretrain_without(tmp_path):
    iterations = ["--train-iters", str(STEPS)]
    theirs = _pretrain(tmp_path / "theirs", *iterations)
    ours = _pretrain(tmp_path / "ours", *iterations, "--use-forge")
    assert theirs["owned"] == 0
    assert ours["owned"] == 10
    assert len(ours["losses"]) == STEPS
    assert ours["losses"][-1] < ours["losses"][0] - 1
    assert _gap(theirs["losses"], ours["losses"]) <= 2e-6
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    assert ours["skipped"] == 0
    fused = _pretrain(tmp_path / "fused", *iterations, "--use-forge", "--forge-fused-head")
    assert _gap(theirs["losses"], fused["losses"]) <= 2e-6


@needs_training
def test_context_parallel_pretrain_is_pretrain(tmp_path):
    """FORGE's own layer spec has attention for it; Megatron's cannot be built without Transformer Engine."""
    alone = ["--train-iters", "8", "--tensor-model-parallel-size", "1"]
    theirs = _pretrain(tmp_path / "theirs", *alone)  # which the two ranks share as data-parallel ones
    ours = _pretrain(tmp_path / "ours", *alone, "--context-parallel-size", "2", "--cp-comm-type", "a2a", "--use-forge")
    assert ours["owned"] == 10
    assert _gap(theirs["losses"], ours["losses"]) <= 2e-6
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


@needs_training
def test_a_run_with_forge_resumes_in_one_without_and_the_reverse(tmp_path):
    whole = _pretrain(tmp_path / "whole", "--train-iters", "8")
    for writer, reader, name in ((["--use-forge"], [], "a"), ([], ["--use-forge"], "b")):
        folder = str(tmp_path / name)
        saved = ["--save", folder, "--save-interval", "4"]
        first = _pretrain(tmp_path / f"{name}1", "--train-iters", "8", "--exit-interval", "4", *saved, *writer)
        second = _pretrain(tmp_path / f"{name}2", "--train-iters", "8", "--load", folder, *reader)
        assert _gap(whole["losses"], first["losses"] + second["losses"]) <= 2e-6


FSDP2 = ["--use-torch-fsdp2", "--tensor-model-parallel-size", "1", "--ckpt-format", "torch_dcp"]


@needs_training
def test_pretrain_on_fsdp2_is_pretrain_on_ddp(tmp_path):
    """Not on FSDP2: there Megatron's own gradients are not divided by the tokens of --calculate-per-token-loss."""
    theirs = _pretrain(tmp_path / "theirs", "--train-iters", "8", "--tensor-model-parallel-size", "1")
    ours = _pretrain(tmp_path / "ours", "--train-iters", "8", *FSDP2, "--use-forge", connections="8")
    assert ours["sharded"] == 28
    assert _gap(theirs["losses"], ours["losses"]) <= 2e-6
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    folder = str(tmp_path / "saved")
    saved = [*FSDP2, "--use-forge", "--save", folder, "--save-interval", "4", "--train-iters", "8"]
    first = _pretrain(tmp_path / "first", *saved, "--exit-interval", "4", connections="8")
    second = _pretrain(tmp_path / "second", *saved, "--load", folder, connections="8")
    assert first["losses"] + second["losses"] == ours["losses"]
    told = _pretrain(tmp_path / "no", *saved, "--ckpt-format", "torch_dist", refused=True, connections="8")
    assert "ckpt_format='torch_dist' with use_torch_fsdp2" in told


@needs_training
def test_a_switch_that_is_not_built_is_refused_by_name(tmp_path):
    told = _pretrain(tmp_path / "refused", "--train-iters", "1", "--use-forge", "--log-num-zeros-in-grad", refused=True)
    assert "FORGE does not train with these Megatron switches yet" in told
    assert "log_num_zeros_in_grad=True" in told


def test_the_arguments_are_megatrons_to_parse():
    from argparse import ArgumentParser

    from forge_megatron.megatron.arguments import add_forge_args, options_from_args

    parser = add_forge_args(ArgumentParser())
    assert not parser.parse_args([]).use_forge
    args = parser.parse_args(["--use-forge", "--forge-recipe", "fp32-master", "--forge-update", "step"])
    assert (args.use_forge, args.forge_recipe, args.forge_update, args.forge_backend) == (
        True,
        "fp32-master",
        "step",
        "auto",
    )
    assert parser.parse_args(["--forge-backend", "hopper"]).forge_backend == "hopper"
    sums = parser.parse_args(["--forge-accumulation-dtype", "bf16"])
    assert options_from_args(args).accumulation_dtype is torch.float32
    assert options_from_args(sums).accumulation_dtype is torch.bfloat16
    with pytest.raises(SystemExit):
        parser.parse_args(["--forge-update", "later"])
