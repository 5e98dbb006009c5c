"""The kernels in plain torch: what the CPU runs, and what the Triton kernels are judged against.

The arithmetic is the rule's own function. The gradient exists for one block of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..formats.code import as_bytes, in_blocks, spread
from ..formats.fp8 import WEIGHT, encode_stochastically
from ..formats.noise import random_bits
from ..formats.philox import round_stochastically
from ..rules.bind import bind, torch_language
from .lookups import Lookups, is_lookup
from .measured import Reading
from .slot import Segment, Slot

#: Elements of the gradient that exist at once: large enough for a full-speed GEMM, small enough
#: that the rule's temporaries stay in the cache (half the step time of 1 << 20, measured).
BLOCK_ELEMENTS = 1 << 17


def wgrad_step(slot, segments, accumulator, multiplier, channels=None) -> None:
    segments, lookups = _fp32_inputs(segments)
    norm = None if slot.norm_sq is None else _zero_norm(slot.weight)
    for rows in _row_blocks(slot.weight.shape):
        grad = _wgrad(segments, lookups, accumulator, rows, slot.weight)
        if norm is not None:
            norm += _sum_of_squares(grad)
        _apply(slot, rows, _scaled(grad, channels, rows), multiplier)
    if norm is not None:
        slot.norm_sq.data.copy_(norm)


def wgrad_norm_sq(segments, out, accumulator, shape, known=None, channels=None) -> None:
    if known is not None and bool(known[1]):
        out.data.copy_(known[0])
        return
    segments, lookups = _fp32_inputs(segments)
    template = accumulator if accumulator is not None else out.new_empty(()).expand(shape)
    norm = _zero_norm(out)
    for rows in _row_blocks(shape):
        norm += _sum_of_squares(_scaled(_wgrad(segments, lookups, accumulator, rows, template), channels, rows))
    out.data.copy_(norm)


def wgrad_write(segments, out, accumulator) -> None:
    segments, lookups = _fp32_inputs(segments)
    for rows in _row_blocks(out.shape):
        out.data[rows] = _wgrad(segments, lookups, accumulator, rows, out)


def measures(reading: Reading) -> bool:
    return True


def steps(slot: Slot) -> bool:
    return True


def measure(reading: Reading, segments, accumulator, multiplier, out) -> list[Tensor]:
    grad = accumulator
    if segments:
        wgrad_write(segments, out, accumulator)
        grad = out
    grad = grad.float()
    if reading.norm_sq is not None:
        reading.norm_sq.data.copy_(_sum_of_squares(grad))
    if multiplier is not None:
        grad = grad * multiplier
    weight = grad if reading.weight is None else reading.weight.float()
    values = bind(reading.values, torch_language)(grad, weight, (*reading.scalars.unbind(), *reading.factors))
    numbers = []
    for (index, dims), share in zip(reading.over, reading.shares, strict=True):
        value = values[index]
        if dims and reading.largest and value.numel():
            value = value.amax(dims, keepdim=True)
        elif dims:
            value = value.sum(dims, keepdim=True).mul_(share)
        numbers.append(value)
    return numbers


def measured_step(slot: Slot, gradient: Tensor, multiplier, factors: Sequence[Tensor]) -> None:
    _apply(slot, (), gradient.float(), multiplier, factors)


def step(slots: Sequence[Slot], grads: Sequence[Tensor], multiplier) -> None:
    for slot, grad in zip(slots, grads, strict=True):
        grad = grad.float()
        if slot.norm_sq is not None:
            slot.norm_sq.data.copy_(_sum_of_squares(grad))
        _apply(slot, (), grad, multiplier)


def _row_blocks(shape) -> Iterator[slice]:
    rows, columns = shape
    size = max(1, BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def _fp32_inputs(segments: Sequence[Segment]) -> tuple[list[Segment], Lookups | None]:
    dense = [(dy, x.float()) for dy, x in segments if not is_lookup((dy, x))]
    return dense, Lookups.of([segment for segment in segments if is_lookup(segment)])


def _wgrad(segments, lookups, accumulator, rows: slice, template: Tensor) -> Tensor:
    """Rows of ``sum dY^T X + accumulator``, in fp32. X is fp32 already, dY is not."""
    grad = None if accumulator is None else accumulator[rows].to(torch.float32, copy=True)
    for dy, x in segments:
        dy = dy[:, rows].float().t()
        grad = dy @ x if grad is None else grad.addmm_(dy, x)
    if grad is None:
        grad = torch.zeros_like(template[rows], dtype=torch.float32, memory_format=torch.contiguous_format)
    if lookups is not None:
        lookups.add_to(grad, rows.start)
    return grad


def _scaled(grad: Tensor, channels: Tensor | None, rows: slice) -> Tensor:
    if channels is None:
        return grad
    return grad * (channels[rows] if channels.shape[1] == 1 else channels)


def _apply(slot: Slot, rows, grad: Tensor, multiplier, factors: Sequence[Tensor] = ()) -> None:
    """Step the coordinates ``rows`` of ``slot`` with ``grad``, which may be overwritten."""
    first = rows.start * slot.weight.shape[1] if rows else 0
    rule = slot.rule
    if multiplier is not None:
        grad = grad * multiplier
    # .data: the caller owns the version counters, and bumps each once a step.
    weight = slot.weight.data[rows]
    source = weight if slot.master is None else slot.master.data[rows]
    states = [state.data[rows] for state in slot.states]
    scales = [scale.data[rows] for scale in slot.scales] or [None] * len(states)
    codes = slot.codes()
    stored = list(zip(codes, states, scales, strict=True))
    update = bind(rule.update, torch_language)
    weight_scale = None if slot.weight_scale is None else slot.weight_scale.data[rows]
    if weight_scale is not None:
        source = WEIGHT.load(weight, weight_scale)
    if rule.on_scratch:
        source = torch.full_like(weight, math.nan)
    old = tuple(code.load(state, scale) for code, state, scale in stored)
    new_weight, new_states = update(grad, source.float(), old, (*slot.scalars.unbind(), *factors))
    finite = torch.isfinite(grad)
    if factors:
        # The update reads more than its coordinate: one that it would leave not finite is left alone too.
        finite &= torch.isfinite(new_weight)
    blocks = None
    if slot.is_scaled:
        # A block is one number of many digits: all of it is stepped, or none.
        blocks = ~in_blocks(torch.atleast_1d(~finite)).any(-1)
        finite = spread(blocks, grad.shape[-1] if grad.dim() else 1).view(grad.shape)
    for (code, state, scale), new in zip(stored, new_states, strict=True):
        encoded, new_scale = code.store(new)
        _keep(state, encoded, finite)
        if scale is not None:
            _keep(scale, new_scale, blocks)
    new_weight = torch.where(finite, new_weight, source)
    if slot.noise is None:
        weight.copy_(new_weight)
    elif weight_scale is None:
        bits = random_bits(slot.noise, first, weight.numel()).view(weight.shape)
        weight.copy_(round_stochastically(new_weight.float(), bits))
    else:
        bits = random_bits(slot.noise, first, weight.numel()).view(weight.shape)
        scale = WEIGHT.scale(in_blocks(new_weight.abs()).amax(-1))
        codes = encode_stochastically(new_weight, spread(scale, weight.shape[-1]), bits)
        _keep(weight, codes, finite)
        _keep(weight_scale, scale, blocks)
    if slot.master is not None:
        source.copy_(new_weight)


def _keep(state: Tensor, new: Tensor, finite: Tensor) -> None:
    """Replace ``state`` by ``new`` where ``finite``. Bytes are selected as bytes: torch selects no fp8."""
    state, new = as_bytes(state), as_bytes(new)
    state.copy_(torch.where(finite, new, state))


def _sum_of_squares(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad, dtype=torch.float64).square()


def _zero_norm(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=like.device)
