"""Steps of rules in stages: epilogue into a scratch, matrix stage on it, apply to the weight.

A scratch holds one layer, or several small ones of no more elements than ``STACK_ELEMENTS`` together. It is the next
one's too: the caching allocator gives it its memory, or it is the one on which CUDA graphs are replayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..rules.stages import STORE_GRADIENT, Stage
from ..rules.whole import WHOLE, Whole
from . import fused, measured
from .replays import replays_of
from .slot import Segment, Slot

#: Elements up to which the scratches of several weights exist at once, so that they share launches.
STACK_ELEMENTS = 1 << 24


class Launch:
    """Steps one matrix from its gradient's factors, of one layout: the epilogue's kernel is chosen once for them."""

    def __init__(self, backend: str):
        self._backend = backend
        self._epilogue: fused.Launch | None = None

    def __call__(
        self, slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None
    ) -> None:
        if _measures_gradient(slot):
            measured.wgrad_step(slot, segments, accumulator, multiplier, self._backend)
            return
        with _scratch([slot], self._backend) as (stack, whole):
            with _kept_epilogue(slot, stack[0]) as kept:
                if self._epilogue is None:
                    self._epilogue = _launch(kept, segments, accumulator, multiplier, self._backend)
                self._epilogue(kept, segments, accumulator, multiplier)
            _finish([slot], stack, whole, self._backend)


def wgrad_steps(
    slots: Sequence[Slot],
    segments: Sequence[Sequence[Segment]],
    accumulators: Sequence[Tensor | None],
    multipliers: Sequence[Tensor | None],
    backend: str,
) -> None:
    """Step the matrices of one stack from their gradients' factors."""
    if _measures_gradient(slots[0]):
        for slot, *gradient in zip(slots, segments, accumulators, multipliers, strict=True):
            measured.wgrad_step(slot, *gradient, backend)
        return
    with _scratch(slots, backend) as (stack, whole):
        for slot, u, *gradient in zip(slots, stack, segments, accumulators, multipliers, strict=True):
            with _kept_epilogue(slot, u) as kept:
                _launch(kept, *gradient, backend)(kept, *gradient)
        _finish(slots, stack, whole, backend)


def step(slots: Sequence[Slot], grads: Sequence[Tensor], multiplier: Tensor | None, backend: str) -> None:
    """Step weights of one device from gradients that are in memory."""
    for indices in _batches(slots):
        batch = [slots[index] for index in indices]
        if _measures_gradient(batch[0]):
            for slot, index in zip(batch, indices, strict=True):
                measured.step(slot, grads[index], multiplier, backend)
            continue
        with _scratch(batch, backend) as (stack, whole):
            epilogues = [_epilogue(slot, u) for slot, u in zip(batch, stack, strict=True)]
            fused.step(epilogues, [grads[index] for index in indices], multiplier, backend)
            _finish(batch, stack, whole, backend)


def _launch(
    epilogue: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> fused.Launch:
    if epilogue.rule is STORE_GRADIENT:
        return functools.partial(_store, backend=backend)
    return fused.launch(epilogue, segments, accumulator, multiplier, backend)


def _store(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """The epilogue of rules that begin with G itself: written where it stays, by one GEMM where there is one."""
    u = slot.weight
    fused.wgrad_write(segments, u, accumulator, backend)
    norm_sq = u.new_empty(()) if slot.norm_sq is None else slot.norm_sq
    fused.wgrad_norm_sq((), norm_sq, u, u.shape, backend)
    # Where a fused epilogue leaves one coordinate NaN, this leaves all: no rule that stores G reads just one.
    factor = torch.where(torch.isfinite(norm_sq), 1.0, math.nan)
    u.mul_(factor if multiplier is None else factor * multiplier)


def stacks(slots: Sequence[Slot]) -> Iterator[list[int]]:
    """Indices of the weights that are best stepped together: equal matrices whose matrix stage takes a stack."""
    for indices in _batches(slots):
        stages = slots[indices[0]].rule.stages
        if stages is None or stages.transform is None:
            yield from ([index] for index in indices)
        else:
            yield indices


@contextmanager
def _scratch(batch: Sequence[Slot], backend: str) -> Iterator[tuple[Tensor, Whole]]:
    """fp32, of all matrices, and the whole weight as their matrix stages see it."""
    first = batch[0]
    shape = (len(batch), *first.weight.shape)
    replays = replays_of(batch, backend)
    if replays is None:
        yield torch.empty(shape, dtype=torch.float32, device=first.weight.device), first.whole
        return
    with replays.lock:
        yield replays.scratch(shape), replays


def _measures_gradient(slot: Slot) -> bool:
    """Whether the gradient itself is what is measured: no state is updated before."""
    return bool(slot.rule.stages.measures) and slot.rule.stages.epilogue is STORE_GRADIENT


def _finish(batch: Sequence[Slot], stack: Tensor, whole: Whole, backend: str) -> None:
    if batch[0].rule.stages.measures:
        for slot, u in zip(batch, stack, strict=True):
            measured.finish(slot, u, backend)
    elif stack.numel() or whole is not WHOLE:
        steps, directions = list(map(measured.applied, batch)), _directions(batch, stack, whole)
        if len(batch) == 1:
            fused.dense_step(steps[0], directions[0], backend)
        else:
            fused.step(steps, directions, None, backend)


def _batches(slots: Sequence[Slot]) -> Iterator[list[int]]:
    """Indices of weights of one rule, shape and place in the whole, so that their scratches are one tensor."""
    alike: dict[tuple, list[int]] = {}
    for index, slot in enumerate(slots):
        alike.setdefault((slot.rule, slot.weight.shape, slot.whole), []).append(index)
    for indices in alike.values():
        first = slots[indices[0]]
        size = max(1, STACK_ELEMENTS // max(1, first.whole.shape(first.weight).numel()))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _directions(batch: Sequence[Slot], stack: Tensor, whole: Whole) -> list[Tensor]:
    stages = batch[0].rule.stages
    if stages.transform is None:
        pairs = zip(batch, stack, strict=True)
        return [stages.direct(u, slot.statistics, slot.scalars.unbind(), whole) for slot, u in pairs]
    # A single matrix takes the kernels of a single matrix, whose sums have torch.optim's order.
    if len(batch) == 1:
        return [whole.transform(stack[0], stages.transform, stages.reads)]
    return list(whole.transform(stack, stages.transform, stages.reads))


@contextmanager
def _kept_epilogue(slot: Slot, scratch: Tensor) -> Iterator[Slot]:
    """:func:`_epilogue` on a gradient's factors, kept by ``slot``, for its launches remember much; not the scratch."""
    kept = slot.memo.get("epilogue")
    if kept is None or kept.rule is not slot.rule.stages.epilogue:
        kept = slot.memo["epilogue"] = _epilogue(slot, scratch)
    kept.weight, kept.norm_sq, kept.late_norms = scratch, slot.norm_sq, slot.late_norms
    try:
        yield kept
    finally:
        kept.weight = None


def _epilogue(slot: Slot, scratch: Tensor) -> Slot:
    stage = slot.rule.stages.epilogue
    scalars = slot.scalars[: stage.n_scalars]
    return replace(
        slot,
        rule=stage,
        weight=scratch,
        weight_scale=None,
        **_states(slot, stage),
        scalars=scalars,
        master=None,
        noise=None,
        update_norm_sq=None,
        statistics=(),
    )


def _states(slot: Slot, stage: Stage) -> dict[str, tuple[Tensor, ...]]:
    """The states of a stage, and their scales, as a slot has them."""
    indices = [slot.rule.states.index(name) for name in stage.states]
    scales = tuple(slot.scales[index] for index in indices) if slot.scales else ()
    return {"states": tuple(slot.states[index] for index in indices), "scales": scales}
