"""Steps of rules that measure a gradient first: form it in one layer's scratch, measure, step from it.

The first measure is taken while a tile of the gradient is in registers, where the portable kernel forms it; of a
gradient that is in memory already, or that cuBLAS forms, each measure is one walk over it. A gradient in memory is
its own scratch. Nothing else of the layer's size is made or walked over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..rules.stages import Layer, Measure
from . import fused
from .norms import LateNorms
from .slot import Segment, Slot


@dataclass(frozen=True)
class Reading:
    """What one walk over a gradient ``[..., O, I]`` reads and measures.

    Attributes:
        values, largest: the measure's.
        over: the measure's, of this weight; dimensions count from 0.
        shares: what each number's sum is multiplied with to be a mean, or 1.
        shape: the gradient's.
        weight: what the values read of it: the weight or its master; None: nothing.
        scalars: fp32, what the values read first.
        factors: fp32, each of extent 1 along the dimensions in which it does not vary, contiguous.
        norm_sq, late_norms: as a slot's.
        memo: what launches keep from one step to the next, as a slot's.
    """

    values: Callable
    largest: bool
    over: tuple[tuple[int, tuple[int, ...]], ...]
    shares: tuple[float, ...]
    shape: torch.Size
    weight: Tensor | None
    scalars: Tensor
    factors: Sequence[Tensor]
    norm_sq: Tensor | None = None
    late_norms: LateNorms | None = None
    memo: dict = field(default_factory=dict, repr=False, compare=False)


def wgrad_step(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """Step one matrix from its gradient's factors, of a rule whose epilogue leaves the gradient."""
    if accumulator is not None and not any(x.shape[0] for _, x in segments):
        step(slot, accumulator, multiplier, backend)
        return
    scratch = torch.empty(slot.weight.shape, dtype=torch.float32, device=slot.weight.device)
    if fused.forms_alone(segments, scratch, accumulator, backend):
        fused.wgrad_write(segments, scratch, accumulator, backend)
        segments, accumulator = (), None
    elif not segments and accumulator is None:
        scratch.zero_()
    else:
        _step(slot, segments, accumulator, scratch, multiplier, backend, slot.norm_sq)
        return
    step(slot, scratch, multiplier, backend)


def step(slot: Slot, gradient: Tensor, multiplier: Tensor | None, backend: str) -> None:
    """Step one weight of any shape from a gradient in memory; it is only read."""
    _step(slot, (), gradient, None, multiplier, backend, slot.norm_sq)


def finish(slot: Slot, direction: Tensor, backend: str) -> None:
    """Step one weight from what an epilogue has left, which took the gradient's norm too."""
    _step(slot, (), direction, None, None, backend, None)


def _step(
    slot: Slot,
    segments: Sequence[Segment],
    gradient: Tensor | None,
    scratch: Tensor | None,
    multiplier: Tensor | None,
    backend: str,
    norm_sq: Tensor | None,
) -> None:
    """Measure and apply.

    Args:
        gradient: in memory, or what is added to that of ``segments``.
        scratch: what that of ``segments`` is written to by the first measure.
    """
    stages, whole, own = slot.rule.stages, slot.whole, applied(slot)
    layer = Layer(whole.shape(slot.weight), slot.stepped_dtype)
    h, factors, new = own.scalars.unbind(), _parts(slot, stages.given(slot.statistics)), ()
    witness = None
    for measure in stages.measures:
        reading = _reading(measure, own, factors, layer, norm_sq)
        numbers = ()
        if reading.over or norm_sq is not None or segments:
            numbers = fused.measure(reading, segments, gradient, multiplier, scratch, backend)
        segments, gradient, scratch = (), gradient if scratch is None else scratch, None
        norm_sq = None
        if reading.over:
            reduced = zip(numbers, (dims for _, dims in reading.over), strict=True)
            numbers = tuple(whole.maxima(*reduced) if measure.largest else whole.sums(*reduced))
            of_all = numbers[0].view(()) if numbers[0].numel() == 1 else numbers[0].sum()
            witness = of_all if witness is None else witness + of_all
        replaced, more = measure.settle(numbers, slot.statistics, h, layer)
        factors, new = (*factors, *_parts(slot, more)), new or replaced
    if witness is not None:
        # Where an entry is not finite, no coordinate is stepped.
        if multiplier is None:
            multiplier = torch.rsub(witness, 1.0, alpha=0.0)
        else:
            multiplier = torch.add(multiplier, witness, alpha=0.0)
    if slot.weight.numel():
        fused.measured_step(own, gradient, multiplier, factors, backend)
    finite = None if witness is None else multiplier == multiplier
    for old, value in zip(slot.statistics, new, strict=bool(new)):
        value = value.view(old.shape)
        if finite is None:
            old.copy_(value)
        else:
            torch.where(finite, value, old, out=old)


def _reading(measure: Measure, own: Slot, factors: Sequence[Tensor], layer: Layer, norm_sq: Tensor | None) -> Reading:
    over, shares = _over(measure, layer.shape)
    weight = own.stepped() if measure.reads_weight else None
    # A launch that is remembered reads the weight where it lies, and a copy lies elsewhere each time.
    memo = own.memo if weight is None or own.weight_scale is None else {}
    return Reading(
        measure.values,
        measure.largest,
        over,
        shares,
        own.weight.shape,
        weight,
        own.scalars,
        factors,
        norm_sq,
        own.late_norms,
        memo,
    )


@functools.cache
def _over(measure: Measure, shape: torch.Size) -> tuple[tuple, tuple[float, ...]]:
    """:attr:`Reading.over` and :attr:`Reading.shares`."""
    dims = len(shape)
    over = tuple((index, tuple(sorted(dim % dims for dim in each))) for index, each in measure.over(dims))
    counts = (torch.Size([shape[dim] for dim in each]).numel() for _, each in over)
    return over, tuple(1.0 if measure.largest else 1.0 / max(1, count) for count in counts)


def _parts(slot: Slot, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What belongs to this part of the whole weight, with the weight's dimensions."""
    dims = slot.weight.dim()
    return tuple((slot.whole.part(f) if f.dim() else f.view((1,) * dims)).contiguous() for f in factors)


def applied(slot: Slot) -> Slot:
    """The slot of the rule's last stage; kept by ``slot``, for its launches remember much."""
    stages = slot.rule.stages
    known = slot.memo.get("applied")
    if known is None or known.rule is not stages.apply:
        indices = [slot.rule.states.index(name) for name in stages.apply.states]
        known = slot.memo["applied"] = replace(
            slot,
            rule=stages.apply,
            states=tuple(slot.states[index] for index in indices),
            scales=tuple(slot.scales[index] for index in indices) if slot.scales else (),
            norm_sq=None,
            update_norm_sq=None,
            statistics=(),
        )
        known.scalars = slot.scalars[slot.rule.n_scalars - stages.apply.n_scalars :]
    known.noise, known.late_norms = slot.noise, slot.late_norms
    return known
