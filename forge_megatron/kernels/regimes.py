"""Which way a weight is stepped, by its rule's regime; on operands that were checked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import fused, projected, staged
from .slot import Segment, Slot


def wgrad_step(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """Step one matrix, whose rule has stages, from its gradient's factors."""
    module = staged if slot.rule.stages.projection is None else projected
    module.wgrad_step(slot, segments, accumulator, multiplier, backend)


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
