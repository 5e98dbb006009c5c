"""Which way a weight is stepped, by its rule's regime; on operands that were checked."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from . import fused, projected, staged
from .slot import Slot


def launch(slot: Slot, backend: str) -> fused.Launch:
    """What steps one matrix, whose rule has stages, from its gradient's factors, of one layout."""
    if slot.rule.stages.projection is None:
        return staged.Launch(backend)
    return functools.partial(projected.wgrad_step, backend=backend)


def step(slots: Sequence[Slot], grads: Sequence[Tensor], multiplier: Tensor | None, backend: str) -> None:
    """Step weights of one device from gradients that are in memory."""
    in_one_pass, in_stages = [], []
    for slot, grad in zip(slots, grads, strict=True):
        stages = slot.rule.stages
        if stages is None:
            in_one_pass.append((slot, grad))
        elif stages.projection is None or slot.weight.dim() != 2:
            in_stages.append((slot, grad))
        else:
            projected.step(slot, grad, multiplier, backend)
    if in_one_pass:
        fused.step(*zip(*in_one_pass, strict=True), multiplier, backend)
    if in_stages:
        staged.step(*zip(*in_stages, strict=True), multiplier, backend)
