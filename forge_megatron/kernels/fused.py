"""The operations of fused rules, each on one backend, on operands that were checked."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import WGRAD_ONLY, resolve_backend
from .choice import adds_by_cublas, adds_by_hopper, choose_launch, measures_apart
from .gram import gram_norm_sq, pays
from .slot import Segment, Slot
from .tuned import Candidate

if TYPE_CHECKING:
    from .measured import Reading

#: ``launch(slot, segments, accumulator, multiplier)``
Launch = Callable[[Slot, Sequence[Segment], Tensor | None, Tensor | None], None]


def wgrad_step(
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    backend: str,
    channels: Tensor | None = None,
) -> None:
    """Form the gradient tile by tile and step each tile where it was formed.

    Args:
        channels: fp32 ``[O, 1]`` or ``[1, I]``, contiguous: multiplies each row or column. By the portable kernels.
    """
    if channels is not None:
        module = _module(resolve_backend(slot.weight.device, backend), "wgrad")
        module.wgrad_step(slot, segments, accumulator, multiplier, channels)
        return
    launch(slot, segments, accumulator, multiplier, backend)(slot, segments, accumulator, multiplier)


def launch(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> Launch:
    """What :func:`wgrad_step` calls with the same operands, and with others of the same layout."""
    chosen = choose_launch(slot, segments, accumulator, backend)
    return launch_of(chosen, slot, segments, accumulator, multiplier)


def launch_of(
    chosen: Candidate,
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
) -> Launch:
    """:func:`launch` by one kernel and configuration, which can step ``slot`` from such operands."""
    if chosen.kernel in WGRAD_ONLY:
        return _wgrad_only(chosen.kernel).launch(slot, segments, accumulator, multiplier, chosen.configuration)
    step = _module(chosen.kernel, "wgrad").wgrad_step
    return step if chosen.configuration is None else functools.partial(step, tile=chosen.configuration)


def wgrad_norm_sq(
    segments: Sequence[Segment],
    out: Tensor,
    accumulator: Tensor | None,
    shape: torch.Size,
    backend: str,
    channels: Tensor | None = None,
) -> None:
    """Write the sum of squares of a gradient of ``shape`` to ``out``; ``channels`` as :func:`wgrad_step`'s."""
    module = _module(resolve_backend(out.device, backend), "wgrad")
    known = None
    plain = accumulator is None and channels is None
    if backend == "hopper" and plain and _wgrad_only("hopper").takes_operands(segments, shape):
        _wgrad_only("hopper").wgrad_norm_sq(segments, out, shape)
        return
    if plain and pays(segments, *shape):
        known = gram_norm_sq(segments)
    module.wgrad_norm_sq(segments, out, accumulator, shape, known, channels)


def measures_together(segments: Sequence[Segment], out: Tensor, shape: torch.Size, backend: str) -> bool:
    """Whether :func:`wgrad_norms_sq` takes such factors."""
    if backend == "hopper" or resolve_backend(out.device, backend) == "reference":
        return False
    return _module("triton", "norms").takes(segments, shape)


def wgrad_norms_sq(factors: Sequence[Sequence[Segment]], outs: Sequence[Tensor], shapes: Sequence[torch.Size]) -> None:
    """Write the sums of squares of many gradients, from factors of one device and dtype, to outs of one dtype."""
    _module("triton", "norms").wgrad_norms_sq(factors, outs, shapes)


def wgrad_write(segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None, backend: str) -> None:
    """Write the gradient to ``out``, which may be ``accumulator``."""
    adds = backend == "auto" and adds_by_cublas(out, accumulator)
    if (adds or (backend in ("auto", "cublas") and accumulator is None)) and _one_gemm(segments, out):
        _wgrad_only("cublas").wgrad_write(segments, out, adds=adds)
        return
    if backend == "hopper" or (backend == "auto" and adds_by_hopper(out, accumulator)):
        hopper = _wgrad_only("hopper")
        if hopper.takes_write(segments, out, accumulator):
            hopper.wgrad_write(segments, out, accumulator)
            return
    _module(resolve_backend(out.device, backend), "wgrad").wgrad_write(segments, out, accumulator)


def forms_alone(segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None, backend: str) -> bool:
    """Whether :func:`wgrad_write` forms such a gradient better than a kernel that measures it too."""
    return (
        accumulator is None and _one_gemm(segments, out) and measures_apart(segments[0][0].dtype, out.device, backend)
    )


def measure(
    reading: Reading,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    out: Tensor | None,
    backend: str,
) -> list[Tensor]:
    """Return what ``reading`` asks of ``multiplier * (sum of dY^T X + accumulator)``, by one walk over it.

    Args:
        out: fp32, contiguous: receives the gradient before the multiplier. None: it is not formed in memory.

    Returns:
        fp32, a number for each of ``reading.over``, with the dimensions that they were reduced over of extent 1; those
        of this part of the weight.
    """
    module = _module(resolve_backend(reading.scalars.device, backend), "measure")
    if not module.measures(reading):
        module = _module("reference", "measure")
    return module.measure(reading, segments, accumulator, multiplier, out)


def measured_step(
    slot: Slot, gradient: Tensor, multiplier: Tensor | None, factors: Sequence[Tensor], backend: str
) -> None:
    """Step one weight of any shape from a gradient in memory and what was measured of it.

    Args:
        factors: fp32, contiguous, of extent 1 along the dimensions in which they do not vary; the update reads them
            after its scalars.
    """
    module = _module(resolve_backend(slot.weight.device, backend), "measure")
    if not module.steps(slot):
        module = _module("reference", "measure")
    module.measured_step(slot, gradient, multiplier, factors)


def step(slots: Sequence[Slot], grads: Sequence[Tensor], multiplier: Tensor | None, backend: str) -> None:
    """Step weights of one device from gradients that are in memory."""
    _module(resolve_backend(slots[0].weight.device, backend), "step").step(slots, grads, multiplier)


def dense_step(slot: Slot, grad: Tensor, backend: str) -> None:
    """:func:`step` of one weight: by a launch that is remembered, where it is dense and the gradient fp32."""
    resolved = resolve_backend(slot.weight.device, backend)
    dense = grad.dtype is torch.float32 and grad.dim() > 0 and grad.numel() > 0 and grad.is_contiguous()
    if resolved == "reference" or not (dense and all(tensor.is_contiguous() for _, tensor in slot.tensors())):
        _module(resolved, "step").step([slot], [grad], None)
    else:
        _wgrad_only("cublas").dense_step(slot, grad, None)


@functools.cache
def _wgrad_only(name: str) -> ModuleType:
    return importlib.import_module(f".{name}_wgrad", __package__)


@functools.cache
def _module(backend: str, part: str) -> ModuleType:
    # Triton is imported by its first use: importing this package must not need it.
    name = "reference" if backend == "reference" else f"triton_{part}"
    return importlib.import_module(f".{name}", __package__)


def _one_gemm(segments: Sequence[Segment], out: Tensor) -> bool:
    """Whether one call of cuBLAS gives ``G``, or adds it to ``out``, with one rounding."""
    if len(segments) != 1 or not out.is_contiguous() or not out.is_cuda:
        return False
    dy, x = segments[0]
    half = dy.dtype in (torch.bfloat16, torch.float16) and dy.dtype is x.dtype
    return half and bool(dy.shape[0]) and out.dtype in (dy.dtype, torch.float32)
