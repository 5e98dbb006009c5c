"""Which kernel steps a weight from its gradient's factors: the one place that decides, and can say.

========== =====================================================================================
hopper     warp-specialised, on compute capability 9.0: a tile's state moves beside another's GEMM;
           states in fp32 or bf16
cublas     the GEMM into a scratch of one weight, summed in fp32, and one elementwise step
triton     portable: a tile's GEMM, then its step
reference  torch, in blocks of rows
========== =====================================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import has_tried_gluon, is_hopper, resolve_backend
from .cost import MEASURED_BYTES, cublas_us, hopper_us
from .hopper_config import choose_config
from .lookups import is_lookup
from .slot import Segment, Slot
from .tuned import Candidate, lookup, note

#: Bytes to which the copy engine's rows are aligned.
ROW_ALIGNMENT = 16

#: Coordinates from which the Hopper kernel adds to an accumulator faster than cuBLAS does.
LARGE = 1 << 25


def choose(
    shape: Sequence[int],
    tokens: int,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    element_bytes: int = MEASURED_BYTES,
    accumulator: bool = False,
    stochastic: bool = False,
    backend: str = "auto",
) -> str:
    """Return the kernel's name for contiguous operands: what ``coverage`` shows.

    Args:
        shape: the weight's, ``[O, I]``.
        tokens: of all segments together.
        device: the weight's.
        dtype: of weight, dY and X.
        element_bytes: of weight, master and states together, for one coordinate.
        accumulator: whether a gradient that was summed before comes in too.
        stochastic: whether the weight is rounded stochastically.
        backend: what the user asked for; anything but ``"auto"`` is only checked.

    Raises:
        RuntimeError, ValueError: as :func:`resolve_backend`.
    """
    resolved = resolve_backend(device, backend)
    if backend != "auto" or resolved == "reference":
        return resolved
    half = dtype in (torch.bfloat16, torch.float16)
    aligned = all(extent * dtype.itemsize % ROW_ALIGNMENT == 0 for extent in shape)
    if not (half and aligned and tokens and min(shape)) or not is_hopper(torch.device(device)):
        return "triton"
    if accumulator:
        return "hopper" if has_tried_gluon() else "triton"
    if not has_tried_gluon():
        return "cublas"
    sizes = (*shape, tokens, element_bytes, stochastic)
    return "hopper" if hopper_us(choose_config(*sizes), *sizes) <= cublas_us(*sizes) else "cublas"


def choose_for(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, backend: str) -> str:
    """Return the kernel's name for these operands, whose strides and addresses may refuse one.

    Raises:
        ValueError: ``backend`` asks for a kernel that cannot take them.
    """
    weight = slot.weight
    if any(map(is_lookup, segments)):
        # Only the portable kernels know ids.
        return "reference" if resolve_backend(weight.device, backend) == "reference" else "triton"
    dtypes = {tensor.dtype for segment in segments for tensor in segment}
    chosen = choose(
        weight.shape,
        sum(dy.shape[0] for dy, _ in segments),
        weight.device,
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        element_bytes=slot.element_bytes,
        accumulator=accumulator is not None,
        stochastic=slot.noise is not None,
        backend=backend,
    )
    if chosen == "hopper" and not _hopper().supports(slot, segments, accumulator):
        if backend == "hopper":
            raise _refused_by_hopper(slot)
        chosen = "cublas"
    if chosen == "cublas" and not _cublas().supports(slot, segments, accumulator):
        if backend == "cublas":
            raise ValueError(
                f'{slot.name}: backend="cublas" takes bf16 or fp16 operands of one dtype, some tokens, no accumulator, '
                'and a contiguous weight, master and states; use backend="auto"'
            )
        chosen = "triton"
    return chosen


def choose_experts(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, backend: str) -> str:
    """Return the kernel's name for the operands of experts in one tensor; cuBLAS steps none.

    Raises:
        ValueError: ``backend`` asks for a kernel that cannot take them.
    """
    device = slot.weight.device
    if resolve_backend(device, backend) == "reference":
        return "reference"
    # A batch may route no token to the experts of a rank.
    if not experts_by_hopper(device, backend) or not any(x.shape[0] for _, x in segments):
        return "triton"
    if _hopper().supports(slot, segments, accumulator):
        return "hopper"
    if backend == "hopper":
        raise _refused_by_hopper(slot)
    return "triton"


def experts_by_hopper(device: torch.device, backend: str) -> bool:
    """Whether the Hopper kernel is taken for experts in one tensor, where it can take them.

    The portable kernel takes 1.45 to 1.83 times as long to step 8 to 64 experts, torch's grouped product and a step
    1.22 to 1.5 times (one H200, ``recipes/bench/results/h200_experts.jsonl``).
    """
    if backend == "auto":
        return is_hopper(device) and has_tried_gluon()
    return backend == "hopper"


def choose_launch(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, backend: str) -> Candidate:
    """Return what was tuned for these operands, or else the kernel of :func:`choose_for`, which configures itself.

    Raises:
        ValueError: as :func:`choose_for`.
    """
    tuned = lookup(slot, segments, accumulator, backend)
    if tuned is not None and not can_step(tuned.kernel, slot, segments):
        tuned = None
    chosen = tuned or Candidate(choose_for(slot, segments, accumulator, backend))
    note(slot, sum(x.shape[0] for _, x in segments), chosen, tuned=tuned is not None)
    return chosen


def can_step(kernel: str, slot: Slot, segments: Sequence[Segment]) -> bool:
    """Whether ``"auto"`` may take ``kernel`` for these operands."""
    device = slot.weight.device
    if kernel == "hopper":
        return is_hopper(device) and has_tried_gluon() and _hopper().supports(slot, segments)
    return kernel != "cublas" or (device.type == "cuda" and _cublas().supports(slot, segments, None))


def measures_apart(dtype: torch.dtype, device: torch.device | str, backend: str) -> bool:
    """Whether cuBLAS forms a gradient that a rule measures, of one pair of factors of ``dtype``, before a walk.

    Otherwise the portable kernel measures it while it forms it, which saves that walk. cuBLAS multiplies faster by
    more: a step of LARS for ``[14336, 4096]`` takes 452 µs against 502 at 512 tokens, 954 against 1093 at 4096, one of
    Adafactor 446 against 480 and 944 against 1195 (one H200).
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return half and torch.device(device).type == "cuda" and backend in ("auto", "cublas")


def adds_by_cublas(out: Tensor, accumulator: Tensor | None) -> bool:
    """Whether ``"auto"`` takes cuBLAS to add a gradient in place to ``accumulator``, where one GEMM can.

    A large sum moves beside the Hopper kernel's GEMM: in fp32 ``[14336, 4096]`` at 512 tokens takes it 157 µs, cuBLAS
    199 and the portable kernel 326; ``[2048, 8192]`` 95, 65 and 97; ``[6144, 2048]`` 114, 48 and 69 (one H200).
    """
    return accumulator is out and not adds_by_hopper(out, accumulator)


def adds_by_hopper(out: Tensor, accumulator: Tensor | None) -> bool:
    """Whether ``"auto"`` takes the Hopper kernel to add a gradient to ``accumulator``, where it can."""
    return accumulator is not None and out.numel() >= LARGE and is_hopper(out.device) and has_tried_gluon()


def _refused_by_hopper(slot: Slot) -> ValueError:
    return ValueError(
        f'{slot.name}: backend="hopper" takes bf16 or fp16 operands of one dtype with 16-byte aligned rows '
        "of unit stride as the weight's, the states' and the accumulator's, some tokens, and states in fp32 or bf16; "
        'use backend="auto"'
    )


def _hopper():
    return importlib.import_module(".hopper_wgrad", __package__)


def _cublas():
    return importlib.import_module(".cublas_wgrad", __package__)
