"""cuBLAS into a scratch of one weight, or of some rows of a large one, then one elementwise step.

The scratch is fp32: the GEMM's sum is rounded once, by the store of the step, as in the fused
kernels. It lives for one call, so the caching allocator gives its memory to the next weight; a
captured graph keeps it in its own pool.
"""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.code import as_bytes
from .blocks import of_rows, step_by_rows
from .norms import add_up
from .slot import Segment, Slot
from .triton_epilogue import by_blocks, step_coordinates
from .triton_language import compiled_codes, compiled_update, load_scalars
from .triton_launch import launched
from .triton_noise import block_bits, flat_bits

#: Bytes of a scratch, where a weight is more than twice as large: a language model's head. A multiple of so many rows.
SCRATCH_BYTES = 1 << 28
ROWS = 128

#: Elements that one program steps.
BLOCK = 2048
NUM_WARPS = 4


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
    weight_scale,
    states,
    scales,
    master,
    scalars,
    noise,
    multiplier,
    partials,
    size,
    columns,
    UPDATE: tl.constexpr,
    CODES: tl.constexpr,
    ON_SCRATCH: tl.constexpr,
    N_SCALARS: tl.constexpr,
    GROUPED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    bits = None
    blocks = ()
    has_block = None
    if len(scales) > 0 or weight_scale is not None:
        offset, inside, block, has_block, begin = by_blocks(program.to(tl.int64), size, columns, BLOCK, WHOLE)
        for index in tl.static_range(len(scales)):
            blocks = blocks + (scales[index] + block,)
        if weight_scale is not None:
            weight_scale += block
        if noise is not None:
            bits = block_bits(noise, begin, BLOCK // 64, GROUPED)
    else:
        first = program.to(tl.int64) * BLOCK
        offset = first + tl.arange(0, BLOCK)
        inside = offset < size
        if noise is not None:
            bits = flat_bits(noise, first, BLOCK, GROUPED)
    h = load_scalars(scalars, N_SCALARS)
    g = tl.load(gradient + offset, mask=inside, other=0.0)
    if partials is not None:
        tl.store(partials + program, tl.sum(g * g))
    if multiplier is not None:
        g *= tl.load(multiplier)
    if master is not None:
        master += offset
    stored = ()
    for index in tl.static_range(len(states)):
        stored = stored + (states[index] + offset,)
    step_coordinates(
        g,
        inside,
        weight + offset,
        weight_scale,
        master,
        stored,
        blocks,
        has_block,
        h,
        bits,
        UPDATE,
        CODES,
        False,
        ON_SCRATCH,
    )


def launch(slot: Slot, segments: Sequence[Segment], *others) -> Callable[..., None]:
    """As :func:`fused.launch`, for operands that :func:`supports` has taken."""
    return lambda slot, segments, _accumulator, multiplier: wgrad_step(slot, segments, multiplier)


def wgrad_step(slot: Slot, segments: Sequence[Segment], multiplier: Tensor | None) -> None:
    """Step one weight that :func:`supports` has taken."""
    rows, columns = slot.weight.shape
    at_once = max(SCRATCH_BYTES // (4 * columns * ROWS) * ROWS, ROWS)
    if rows <= 2 * at_once:
        dense_step(slot, gradient(slot.weight.shape, segments), multiplier)
        return
    parts = (slice(first, min(first + at_once, rows)) for first in range(0, rows, at_once))
    step_by_rows(
        slot,
        ((part, [of_rows(segment, part) for segment in segments]) for part in parts),
        lambda own, _, factors: dense_step(own, gradient(own.weight.shape, factors), multiplier),
    )


def wgrad_write(segments: Sequence[Segment], out: Tensor, *, adds: bool = False) -> None:
    """Write the gradient of one pair of 16-bit factors to ``out``, contiguous, of their dtype or fp32, or add it."""
    ((dy, x),) = segments
    if not adds:
        other = {} if out.dtype is dy.dtype else {"out_dtype": out.dtype}
        torch.mm(dy.t(), x, out=out, **other)
    elif out.dtype is torch.float32:
        torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)
    else:
        # By itself cuBLAS may round the product before it adds it: the sum would be rounded twice.
        out.add_(gradient(out.shape, segments))


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
    noise = None if slot.noise is None else (slot.noise.words.data_ptr(), slot.noise.is_grouped)
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    scratch = slot.weight.data_ptr() % 16 if slot.rule.on_scratch else None
    key = "dense", slot.rule, slot.norm_sq is None, noise, scaled, grad.data_ptr() % 16, scratch
    known = slot.memo.get(key)
    if known is None:
        known = slot.memo[key] = _DenseStep(slot)
    known(slot, grad, multiplier)


class _DenseStep:
    """The elementwise step, bound to one weight: gradient, multiplier and a scratch alone change from call to call."""

    def __init__(self, slot: Slot):
        programs = triton.cdiv(slot.weight.numel(), BLOCK)
        if slot.is_scaled:
            programs = triton.cdiv(slot.blocks, BLOCK // 64)
        self.grid = (programs, 1)
        self.partials = None
        if slot.norm_sq is not None:
            self.partials = torch.empty(programs, dtype=torch.float32, device=slot.weight.device)
        self.prepared = None

    def __call__(self, slot: Slot, grad: Tensor, multiplier: Tensor | None) -> None:
        if self.prepared is None:
            self._first(slot, grad, multiplier)
        else:
            scratch = (slot.weight,) if slot.rule.on_scratch else ()
            self.prepared(grad, *(() if multiplier is None else (multiplier,)), *scratch)
        if self.partials is not None:
            add_up(slot.norm_sq, self.partials, slot.late_norms)

    def _first(self, slot: Slot, grad: Tensor, multiplier: Tensor | None) -> None:
        arguments = {
            "gradient": grad,
            "weight": as_bytes(slot.weight),
            "weight_scale": slot.weight_scale,
            "states": tuple(map(as_bytes, slot.states)),
            "scales": tuple(slot.scales),
            "master": slot.master,
            "scalars": slot.scalars,
            "noise": None if slot.noise is None else slot.noise.words,
            "multiplier": multiplier,
            "partials": self.partials,
            "size": slot.weight.numel(),
            "columns": slot.weight.shape[-1],
            "UPDATE": compiled_update(slot.rule),
            "CODES": compiled_codes(slot),
            "ON_SCRATCH": slot.rule.on_scratch,
            "N_SCALARS": slot.rule.n_scalars,
            "GROUPED": slot.noise is not None and slot.noise.is_grouped,
            "WHOLE": slot.weight.shape[-1] % 64 == 0,
            "BLOCK": BLOCK,
        }
        changing = [name for name in ("gradient", "multiplier") if arguments[name] is not None]
        changing += ["weight"] if slot.rule.on_scratch else []
        self.prepared = launched(dense_step_kernel, self.grid, (), {**arguments, "num_warps": NUM_WARPS}, changing)
