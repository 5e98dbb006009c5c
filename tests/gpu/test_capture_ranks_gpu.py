"""A step over data-parallel ranks as one CUDA graph, its collectives in it, has the bits of an eager one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from captured_ranks import ARMS, expect_equal_steps, train
from ranks import run

pytestmark = pytest.mark.timeout(600)

WORLD = min(2, torch.cuda.device_count())


def _bits():
    for name in ARMS:
        expect_equal_steps(train(name, "cuda", captured=True), train(name, "cuda", captured=False))


def test_captured_steps_have_the_bits_of_eager_ones():  # field log row 80
    """On each rank another batch; replicas are bit-equal behind every arm."""
    run(WORLD, _bits, backend="nccl")
