"""cuBLAS into a scratch of one weight, then one elementwise step.

The scratch is fp32: the GEMM's sum is rounded once, by the store of the step, as in the fused
kernels. It lives for one call, so the caching allocator gives its memory to the next weight; a
captured graph keeps it in its own pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .slot import Segment, Slot
from .triton_language import compiled_format, compiled_update, is_finite, load_scalars, round_to
from .triton_wgrad import shared_format

#: Elements that one program steps.
BLOCK = 2048
NUM_WARPS = 8


def supports(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None) -> bool:
    """Whether this path can step ``slot``: 16-bit operands of one dtype, contiguous state, tokens."""
    dtypes = {tensor.dtype for segment in segments for tensor in segment}
    return (
        accumulator is None
        and any(dy.shape[0] for dy, _ in segments)
        and dtypes in ({torch.bfloat16}, {torch.float16})
        and slot.weight.numel() > 0
        and all(tensor.is_contiguous() for _, tensor in slot.tensors())
    )


@triton.jit
def dense_step_kernel(
    gradient,
    weight,
    states,
    master,
    scalars,
    multiplier,
    partials,
    size,
    UPDATE: tl.constexpr,
    DECODE: tl.constexpr,
    ENCODE: tl.constexpr,
    N_SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    offset = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    h = load_scalars(scalars, N_SCALARS)
    g = tl.load(gradient + offset, mask=inside, other=0.0)
    if partials is not None:
        tl.store(partials + program, tl.sum(g * g))
    if multiplier is not None:
        g *= tl.load(multiplier)
    if master is not None:
        w = tl.load(master + offset, mask=inside, other=0.0)
    else:
        w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    old = ()
    for index in tl.static_range(len(states)):
        stored = tl.load(states[index] + offset, mask=inside, other=0.0)
        old = old + (DECODE(stored),)  # noqa: RUF005 - Triton has no unpacking
    new_w, new = UPDATE(g, w, old, h)
    finite = is_finite(g)
    for index in tl.static_range(len(states)):
        kept = tl.where(finite, new[index], old[index])
        tl.store(states[index] + offset, ENCODE(kept), mask=inside)
    w = tl.where(finite, new_w, w)
    if master is not None:
        tl.store(master + offset, w, mask=inside)
    tl.store(weight + offset, round_to(w, weight.dtype.element_ty), mask=inside)


def wgrad_step(slot: Slot, segments: Sequence[Segment], multiplier: Tensor | None) -> None:
    """Step one weight that :func:`supports` has taken."""
    dense_step(slot, gradient(slot.weight.shape, segments), multiplier)


def wgrad_write(segments: Sequence[Segment], out: Tensor) -> None:
    """Write the gradient of one pair of 16-bit factors to ``out``, contiguous, of their dtype or fp32."""
    ((dy, x),) = segments
    if out.dtype is dy.dtype:
        torch.mm(dy.t(), x, out=out)
    else:
        torch.mm(dy.t(), x, out_dtype=out.dtype, out=out)


def gradient(shape: torch.Size, segments: Sequence[Segment]) -> Tensor:
    """Return ``sum dY^T X`` in fp32, from 16-bit factors."""
    scratch = None
    for dy, x in segments:
        if dy.shape[0] and scratch is None:
            scratch = torch.empty(shape, dtype=torch.float32, device=dy.device)
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=scratch)
        elif dy.shape[0]:
            torch.addmm(scratch, dy.t(), x, out_dtype=torch.float32, out=scratch)
    return scratch


def dense_step(slot: Slot, grad: Tensor, multiplier: Tensor | None) -> None:
    """Step one weight by a contiguous fp32 gradient, in one launch."""
    size = slot.weight.numel()
    programs = triton.cdiv(size, BLOCK)
    partials = None
    if slot.norm_sq is not None:
        partials = torch.empty(programs, dtype=torch.float32, device=slot.weight.device)
    decode, encode = compiled_format(shared_format(slot))
    dense_step_kernel[(programs,)](
        grad,
        slot.weight,
        tuple(slot.states),
        slot.master,
        slot.scalars,
        multiplier,
        partials,
        size,
        UPDATE=compiled_update(slot.rule),
        DECODE=decode,
        ENCODE=encode,
        N_SCALARS=slot.rule.n_scalars,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    if partials is not None:
        slot.norm_sq.data.copy_(partials.sum(dtype=torch.float64))
