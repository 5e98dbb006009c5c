"""The kernels' entrance: checks, then one backend.

Throughout, ``G = multiplier * (sum of dY^T X over the segments + accumulator)``. Everything
between the GEMM's accumulator and the stores is fp32, with one rounding to nearest even at each
store. A coordinate whose ``G`` is not finite keeps its weight, master and states, bit for bit.
Without segments and accumulator ``G`` is 0, and the rule's gradient-free part still applies.

Nothing here records autograd history, bumps a version counter or synchronises with the device:
``torch.autograd.graph.increment_version`` is the caller's, once a weight and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.weight import Fp8Weight
from . import fused, grouped, regimes, staged, tuned
from .backend import resolve_backend
from .blocks import is_blocked, row_blocks, step_by_rows
from .entrance import entrance
from .lookups import is_lookup
from .shard import local, local_slot
from .slot import (
    Segment,
    Slot,
    check_accumulator,
    check_multiplier,
    check_segments,
    check_slot,
    layout,
    of_codes,
    place,
)
from .updates import measured


@entrance
def wgrad_step(
    slot: Slot,
    segments: Sequence[Segment],
    *,
    accumulator: Tensor | None = None,
    multiplier: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Form the weight gradient tile by tile and step each tile where it was formed.

    Args:
        slot: an ``[O, I]`` weight, updated in place; ``slot.norm_sq`` receives the sum of squares
            of the gradient, before the multiplier.
        segments: ``(dY [T, O], X [T, I])`` of each use; fp32, bf16 or fp16, any strides, T >= 0. For dY
            may stand the int64 ids ``[T]`` of its one-hot rows, or a :class:`FormedRows`.
        accumulator: fp32 or bf16 ``[O, I]``, a gradient that was summed before; only read.
        multiplier: 0-dim fp32 tensor on the weight's device.
        backend: ``"auto"`` takes what :func:`choose` names; see there and :func:`resolve_backend`.

    Raises:
        TypeError, ValueError: operands that do not fit, named; nothing has changed then.
    """
    key = None
    if accumulator is None and multiplier is None:
        key = _signature(slot, segments, backend)
        known = slot.memo.get("last launch")
        if known is not None and known[0] == key:
            known[1](slot, segments, None, None)
            return
    slot = of_codes(slot)
    check_slot(slot)
    check_multiplier(slot.name, multiplier, slot.weight.device)
    if grouped.is_grouped(slot.weight.shape):
        with measured((slot,)):
            grouped.wgrad_step(slot, segments, accumulator, multiplier, backend)
        return
    if is_blocked(segments):
        with measured((slot,)):
            _step_blocks(slot, segments, accumulator, multiplier, backend)
        return
    launch = _checked_launch(slot, segments, accumulator, multiplier, backend)
    if key is not None:
        slot.memo["last launch"] = key, launch
    with measured((slot,)):
        launch(slot, segments, accumulator, multiplier)


@entrance
def wgrad_steps(
    slots: Sequence[Slot],
    segments: Sequence[Sequence[Segment]],
    *,
    accumulators: Sequence[Tensor | None],
    multipliers: Sequence[Tensor | None],
    backend: str = "auto",
) -> None:
    """:func:`wgrad_step` of several weights, one of :func:`stacks`, of which each argument has one for each.

    Raises:
        TypeError, ValueError: operands that do not fit, named; nothing has changed then.
    """
    slots = list(map(of_codes, slots))
    if len(slots) == 1 or any(map(is_blocked, segments)):
        for slot, factors, accumulator, multiplier in zip(slots, segments, accumulators, multipliers, strict=True):
            wgrad_step(slot, factors, accumulator=accumulator, multiplier=multiplier, backend=backend)
        return
    for slot, factors, accumulator, multiplier in zip(slots, segments, accumulators, multipliers, strict=True):
        check_slot(slot)
        check_multiplier(slot.name, multiplier, slot.weight.device)
        _checked_launch(slot, factors, accumulator, multiplier, backend)
    with measured(slots):
        staged.wgrad_steps(slots, segments, accumulators, multipliers, backend)


@entrance
def wgrad_norm_sq(
    segments: Sequence[Segment],
    out: Tensor,
    *,
    accumulator: Tensor | None = None,
    shape: torch.Size | None = None,
    backend: str = "auto",
) -> None:
    """Write the sum of squares of ``G`` to ``out``, a 0-dim fp32 or fp64 tensor.

    On Triton ``G`` exists one tile at a time.

    Args:
        shape: ``[O, I]``, which ids alone do not tell.

    Raises:
        TypeError, ValueError: operands that do not fit; ``out`` has not changed then.
    """
    resolve_backend(out.device, backend)
    if out.dim() != 0 or out.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"out is {list(out.shape)} {out.dtype}; give a 0-dim fp32 or fp64 tensor")
    shape = _gradient_shape(segments, accumulator, shape)
    if grouped.is_grouped(shape):
        grouped.wgrad_norm_sq(segments, out, accumulator, shape, backend)
        return
    if is_blocked(segments):
        norms = []
        for rows, part in row_blocks(segments, shape[0]):
            norms.append(torch.empty((), dtype=torch.float64, device=out.device))
            added = None if accumulator is None else accumulator[rows]
            wgrad_norm_sq(part, norms[-1], accumulator=added, backend=backend)
        out.data.copy_(torch.stack(norms).sum())
        return
    check_segments("wgrad_norm_sq", segments, shape, out.device)
    if accumulator is not None:
        check_accumulator("wgrad_norm_sq", accumulator, shape, out.device)
    fused.wgrad_norm_sq(segments, out, accumulator, shape, backend)


@entrance
def wgrad_norms_sq(
    segments: Sequence[Sequence[Segment]],
    outs: Sequence[Tensor],
    *,
    accumulators: Sequence[Tensor | None],
    shapes: Sequence[torch.Size],
    backend: str = "auto",
) -> None:
    """:func:`wgrad_norm_sq` of many weights, one of each sequence; on Triton in few launches for all.

    Raises:
        TypeError, ValueError: operands that do not fit; that weight's ``out`` has not changed then.
    """
    together = defaultdict(list)
    for factors, out, accumulator, shape in zip(segments, outs, accumulators, shapes, strict=True):
        if accumulator is None and fused.measures_together(factors, out, shape, backend):
            check_segments("wgrad_norms_sq", factors, shape, out.device)
            together[out.device, factors[0][0].dtype, out.dtype].append((factors, out, shape))
        else:
            wgrad_norm_sq(factors, out, accumulator=accumulator, shape=shape, backend=backend)
    for members in together.values():
        fused.wgrad_norms_sq(*zip(*members, strict=True))


@entrance
def wgrad_accumulate(segments: Sequence[Segment], accumulator: Tensor, *, backend: str = "auto") -> None:
    """Add the sum of ``dY^T X`` to ``accumulator``, fp32 or bf16 ``[O, I]``, rounding once.

    Raises:
        TypeError, ValueError: operands that do not fit; ``accumulator`` has not changed then.
    """
    resolve_backend(accumulator.device, backend)
    check_accumulator("wgrad_accumulate", accumulator, accumulator.shape, accumulator.device)
    if grouped.is_grouped(accumulator.shape):
        grouped.wgrad_write(segments, accumulator, accumulator, backend)
        return
    if accumulator.dim() != 2:
        raise ValueError(f"the accumulator is {list(accumulator.shape)}; it must be [O, I]")
    if is_blocked(segments):
        for rows, part in row_blocks(segments, accumulator.shape[0]):
            wgrad_accumulate(part, accumulator[rows], backend=backend)
        return
    check_segments("wgrad_accumulate", segments, accumulator.shape, accumulator.device)
    if segments:
        fused.wgrad_write(segments, accumulator, accumulator, backend)


@entrance
def wgrad(
    segments: Sequence[Segment], out: Tensor, *, accumulator: Tensor | None = None, backend: str = "auto"
) -> None:
    """Write ``G`` to ``out``, fp32 or bf16 ``[O, I]``: for a gradient that other ranks hold parts of.

    Args:
        segments: as :func:`wgrad_step`'s.
        out: any strides; overwritten, with one rounding.
        accumulator: as :func:`wgrad_step`'s.

    Raises:
        TypeError, ValueError: operands that do not fit; ``out`` has not changed then.
    """
    resolve_backend(out.device, backend)
    check_accumulator("wgrad: out", out, out.shape, out.device)
    if grouped.is_grouped(out.shape):
        grouped.wgrad_write(segments, out, accumulator, backend)
        return
    if out.dim() != 2:
        raise ValueError(f"out is {list(out.shape)}; it must be [O, I]")
    if is_blocked(segments):
        for rows, part in row_blocks(segments, out.shape[0]):
            wgrad(part, out[rows], accumulator=None if accumulator is None else accumulator[rows], backend=backend)
        return
    check_segments("wgrad", segments, out.shape, out.device)
    if accumulator is not None:
        check_accumulator("wgrad", accumulator, out.shape, out.device)
    fused.wgrad_write(segments, out, accumulator, backend)


@entrance
def step(
    slots: Sequence[Slot],
    grads: Sequence[Tensor],
    *,
    multiplier: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Step many weights of any shapes from gradients that are in memory.

    On Triton it is one launch for all slots that share a rule and dtypes.

    Args:
        slots: distinct weights, all on one device. Of DTensors this rank's shards are stepped.
        grads: fp32, bf16 or fp16, each of its weight's shape and placement; any strides.
        multiplier: 0-dim fp32 tensor on the weights' device.

    Raises:
        TypeError, ValueError: operands that do not fit, named; no weight has changed then.
    """
    if len(slots) != len(grads):
        raise ValueError(f"{len(slots)} slots and {len(grads)} gradients; give one for each")
    if not slots:
        return
    slots, grads = [local_slot(slot) for slot in slots], [local(grad) for grad in grads]
    device = slots[0].weight.device
    resolve_backend(device, backend)
    for slot, grad in zip(slots, grads, strict=True):
        check_slot(slot)
        if grad.shape != slot.weight.shape or {grad.device, slot.weight.device} != {device}:
            raise ValueError(
                f"{slot.name}: the gradient is {list(grad.shape)} on {grad.device}, the weight "
                f"{list(slot.weight.shape)} on {slot.weight.device}; expected both on {device}"
            )
        if not grad.dtype.is_floating_point:
            raise TypeError(f"{slot.name}: a gradient of dtype {grad.dtype} cannot be stepped")
    check_multiplier(slots[0].name, multiplier, device)
    with measured(slots):
        regimes.step(slots, grads, multiplier, backend)


def _step_blocks(slot: Slot, segments, accumulator, multiplier, backend: str) -> None:
    rows = slot.weight.shape[0]
    if slot.rule.regime != "fused":
        # Its update reads more than its own rows.
        whole = torch.zeros(slot.weight.shape, dtype=torch.float32, device=slot.weight.device)
        whole = whole if accumulator is None else whole.add_(accumulator)
        wgrad_accumulate(segments, whole, backend=backend)
        regimes.launch(slot, backend)(slot, [], whole, multiplier)
        return

    def step(own: Slot, part: slice, factors: list[Segment]) -> None:
        added = None if accumulator is None else accumulator[part]
        wgrad_step(own, factors, accumulator=added, multiplier=multiplier, backend=backend)

    step_by_rows(slot, row_blocks(segments, rows), step)


#: Layouts of operands that a slot remembers: batches may have a new number of tokens each.
REMEMBERED = 64


def _signature(slot: Slot, segments: Sequence[Segment], backend: str) -> tuple | None:
    """All that the checks of one dense pair of factors read; None: they read more, or are to be made anew."""
    if len(segments) != 1 or slot.update_norm_sq is not None or type(slot.weight) is Fp8Weight:
        return None
    ((dy, x),) = segments
    if type(dy) is not Tensor:
        return None
    return tuned.generation(), *place(slot.weight), backend, slot.rule, slot.norm_sq is None, layout(dy), layout(x)


def _checked_launch(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> fused.Launch:
    """What steps ``slot`` from such operands; they are checked where it has not met their layout before."""
    key = (
        tuned.generation(),
        backend,
        slot.rule,
        slot.norm_sq is None,
        None if accumulator is None else layout(accumulator),
        None if multiplier is None else multiplier.data_ptr() % 16,
        *(layout(tensor) for segment in segments for tensor in segment),
    )
    launch = slot.memo.get(key)
    if launch is not None:
        return launch
    weight = slot.weight
    resolve_backend(weight.device, backend)
    if weight.dim() != 2:
        raise ValueError(f"{slot.name}: shape {list(weight.shape)}; a weight gradient is [O, I]")
    check_segments(slot.name, segments, weight.shape, weight.device)
    if accumulator is not None:
        check_accumulator(slot.name, accumulator, weight.shape, weight.device)
    if len(slot.memo) >= REMEMBERED:
        slot.memo.clear()
    if slot.rule.stages is None:
        launch = fused.launch(slot, segments, accumulator, multiplier, backend)
    else:
        launch = regimes.launch(slot, backend)
    slot.memo[key] = launch
    return launch


def _gradient_shape(segments: Sequence[Segment], accumulator: Tensor | None, shape: torch.Size | None) -> torch.Size:
    if accumulator is not None:
        return accumulator.shape
    if shape is not None and grouped.is_grouped(shape):
        return shape
    dense = next((segment for segment in segments if not is_lookup(segment)), None)
    if dense is not None:
        return torch.Size((dense[0].shape[-1], dense[1].shape[-1]))
    if segments and shape is None:
        raise ValueError("wgrad_norm_sq: ids do not tell how many rows the weight has; give its shape")
    return torch.Size((0, 0)) if shape is None else shape
