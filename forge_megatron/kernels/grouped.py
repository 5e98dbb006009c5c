"""Experts in one tensor ``[E, O, I]``: the gradient of each is ``dY^T X`` over its own tokens.

The tokens lie in the order of their experts. Where each expert's are stays on the device, so that one launch
steps them all without asking how many tokens came: an expert without any is stepped with ``G = 0``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import reference, regimes
from .backend import resolve_backend
from .blocks import at
from .choice import choose_experts, experts_by_hopper
from .grouped_rows import GroupedRows
from .merge import MAX_SEGMENTS
from .slot import Segment, Slot, check_accumulator, check_segments
from .tuned import Candidate, note


def is_grouped(shape: Sequence[int]) -> bool:
    """Whether a weight of ``shape`` holds experts."""
    return len(shape) == 3


def check_grouped(name: str, segments: Sequence[Segment], shape: torch.Size, device: torch.device) -> None:
    """Raise unless every segment is ``GroupedRows, X [T, I]`` of one ``[E, O, I]``."""
    for dy, _ in segments:
        if not isinstance(dy, GroupedRows):
            raise ValueError(f"{name}: shape {list(shape)} holds experts; give dY as GroupedRows")
        bounds = dy.bounds
        if bounds.dtype is not torch.int32 or bounds.shape != (shape[0] + 1,) or bounds.device != device:
            raise ValueError(
                f"{name}: the bounds of the experts' tokens are {list(bounds.shape)} {bounds.dtype} on "
                f"{bounds.device}; give int32 [{shape[0] + 1}] on {device}"
            )
        if not bounds.is_contiguous():
            raise ValueError(f"{name}: the bounds of the experts' tokens are strided; call contiguous()")
    check_segments(name, [(dy.rows, x) for dy, x in segments], shape[1:], device)


def wgrad_step(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """Step every expert of a checked ``slot``; rules that read more than their own coordinate see all of them as one.

    Raises:
        ValueError: operands that do not fit, or that are not contiguous; nothing has changed then.
    """
    shape, device = slot.weight.shape, slot.weight.device
    check_grouped(slot.name, segments, shape, device)
    _check_contiguous(slot.name, accumulator, *(tensor for _, tensor in slot.tensors()))
    if accumulator is not None:
        check_accumulator(slot.name, accumulator, shape, device)
    if slot.rule.stages is not None:
        whole = torch.empty(shape, dtype=torch.float32, device=device)
        wgrad_write(segments, whole, accumulator, backend)
        regimes.step([slot], [whole], multiplier, backend)
        return
    chosen = choose_experts(slot, segments, accumulator, backend)
    note(slot, sum(x.shape[0] for _, x in segments), Candidate(chosen), tuned=False)
    if chosen != "reference":
        _kernels(chosen).wgrad_step(slot, segments, accumulator, multiplier)
        return
    norms = None if slot.norm_sq is None else slot.norm_sq.new_zeros(shape[0])
    for expert, factors in _by_expert(segments, shape[0]):
        part = _part(slot, expert)
        part.norm_sq = None if norms is None else norms[expert]
        part.noise = None if slot.noise is None else slot.noise.below(expert * shape[1])
        reference.wgrad_step(part, factors, None if accumulator is None else accumulator[expert], multiplier)
    if norms is not None:
        slot.norm_sq.data.copy_(norms.sum(dtype=torch.float64))


def wgrad_norm_sq(
    segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None, shape: torch.Size, backend: str
) -> None:
    """Write the sum of squares of all experts' gradients to ``out``."""
    check_grouped("wgrad_norm_sq", segments, shape, out.device)
    _check_contiguous("wgrad_norm_sq", accumulator)
    if resolve_backend(out.device, backend) != "reference":
        hopper = _kernels("hopper") if experts_by_hopper(out.device, backend) and accumulator is None else None
        if hopper is not None and hopper.takes_operands(segments, shape):
            hopper.wgrad_norm_sq(segments, out, shape)
        else:
            _kernels("triton").wgrad_norm_sq(segments, out, accumulator, shape)
        return
    norms = torch.zeros(shape[0], dtype=torch.float64, device=out.device)
    for expert, factors in _by_expert(segments, shape[0]):
        added = None if accumulator is None else accumulator[expert]
        reference.wgrad_norm_sq(factors, norms[expert], added, shape[1:])
    out.data.copy_(norms.sum())


def wgrad_write(segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None, backend: str) -> None:
    """Write the experts' gradients to ``out``, which may be ``accumulator``."""
    check_grouped("wgrad: out", segments, out.shape, out.device)
    _check_contiguous("wgrad: out", accumulator, out)
    if resolve_backend(out.device, backend) != "reference":
        hopper = _kernels("hopper") if experts_by_hopper(out.device, backend) else None
        takes = hopper is not None and hopper.takes_write(segments, out, accumulator)
        (hopper if takes else _kernels("triton")).wgrad_write(segments, out, accumulator)
        return
    for expert, factors in _by_expert(segments, out.shape[0]):
        reference.wgrad_write(factors, out[expert], None if accumulator is None else accumulator[expert])


def first_of(slot: Slot) -> Slot:
    """The first expert's part of ``slot``, from which a launch finds the others."""
    part = _part(slot, 0)
    part.norm_sq, part.noise, part.late_norms = slot.norm_sq, slot.noise, slot.late_norms
    return part


def merge_experts(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that have tokens; more than a launch takes become one.

    Their tokens are brought into the order of the experts on the device.
    """
    segments = [(dy, x) for dy, x in segments if x.shape[0]]
    if len(segments) > MAX_SEGMENTS:
        # Tokens of none come before the first expert's or after the last's.
        experts = [
            torch.searchsorted(dy.bounds, torch.arange(len(x), device=x.device), right=True) for dy, x in segments
        ]
        order = torch.argsort(torch.cat(experts), stable=True)
        bounds = torch.stack([dy.bounds for dy, _ in segments]).sum(0, dtype=torch.int32)
        rows = torch.cat([dy.rows for dy, _ in segments])[order]
        segments = [(GroupedRows(rows, bounds), torch.cat([x for _, x in segments])[order])]
    return segments


def merge_grouped(segments: Sequence[Segment]) -> tuple[list[Segment], tuple[Tensor, ...]]:
    """Return :func:`merge_experts` as plain tensors, and the bounds of each."""
    segments = merge_experts(segments)
    return [(dy.rows, x) for dy, x in segments], tuple(dy.bounds for dy, _ in segments)


def _part(slot: Slot, expert: int) -> Slot:
    key = "expert", expert
    if key not in slot.memo:
        slot.memo[key] = at(slot, expert)
    part = slot.memo[key]
    part.rule = slot.rule
    return part


def _by_expert(segments: Sequence[Segment], experts: int) -> Iterator[tuple[int, list[Segment]]]:
    starts = [dy.bounds.tolist() for dy, _ in segments]
    for expert in range(experts):
        pairs = zip(segments, starts, strict=True)
        yield expert, [(dy.rows[s[expert] : s[expert + 1]], x[s[expert] : s[expert + 1]]) for (dy, x), s in pairs]


def _kernels(name: str) -> ModuleType:
    # Triton is imported by its first use: importing this package must not need it.
    return importlib.import_module(f".{name}_wgrad", __package__)


def _check_contiguous(name: str, *tensors: Tensor | None) -> None:
    if any(tensor is not None and not tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name}: a grouped weight, its states and its gradient must be contiguous")
