"""What PP1 guards, broken one at a time; see gate_breaks.py."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import torch

from forge_megatron import ForgeOptimizer
from forge_megatron.linear import Use


def a_micro_batch_is_forgotten():
    deliver, delivered = Use.deliver, Counter()

    def forgetful(use, dy, x, **kwargs):
        delivered[use.owned] += 1
        deliver(use, dy * (delivered[use.owned] % 2), x, **kwargs)

    return patch.object(Use, "deliver", forgetful)


@contextlib.contextmanager
def a_stage_steps_too_early() -> Iterator[None]:
    """The second stage's weights are others from a micro-batch's backward to the end of the step, which is right."""
    deliver, step = Use.deliver, ForgeOptimizer.step
    before: dict[torch.Tensor, torch.Tensor] = {}

    def delivering(use, *args, **kwargs):
        deliver(use, *args, **kwargs)
        weight = use.owned.weight
        if os.environ["RANK"] == "1" and weight not in before:
            before[weight] = weight.detach().clone()
            weight.data.mul_(1.001)

    def stepping(self, *args, **kwargs):
        for weight, right in before.items():
            weight.data.copy_(right)
        before.clear()
        step(self, *args, **kwargs)

    with patch.object(Use, "deliver", delivering), patch.object(ForgeOptimizer, "step", stepping):
        yield


def no_sum_of_a_tied_pair():
    from launch import step

    return patch.object(step, "finalize_model_grads", lambda *_, **__: None)


def a_stage_is_left_out_of_the_norm():
    from forge_megatron.megatron import ForgeMegatronOptimizer

    norms = ForgeMegatronOptimizer._owned_for_norm
    return patch.object(
        ForgeMegatronOptimizer, "_owned_for_norm", lambda self: [] if os.environ["RANK"] == "1" else norms(self)
    )


BREAKS = {
    a_micro_batch_is_forgotten: "loss gap, interleaved",
    a_stage_steps_too_early: "ΔW, 1F1B",
    no_sum_of_a_tied_pair: "ΔW, 1F1B, tied, clipped",
    a_stage_is_left_out_of_the_norm: "Δstate, interleaved, tied, clipped",
}
