"""What is tried for one weight gradient: curated configurations, by kernel and architecture.

The knobs are those of the paper's Appendix H (tile, tokens of a step, swizzle, warps, stages) and the Hopper kernel's.
It finds 128 x 128 the best tile on every device, and the depth of the pipeline what a shape decides: so the sets are
small, and differ by what shared memory has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .choice import can_step, choose_for
from .hopper_config import CONFIGS, choose_config
from .slot import Segment, Slot
from .tiles import LARGE, LARGE_FP32, SMALL, SMALL_FP32, UNALIGNED, UNALIGNED_FP32, Tile, choose_tile, in_blocks
from .tuned import Candidate

#: Rows of tiles that the Hopper kernel walks together.
GROUPS = (4, 8)


#: What is tried beside the kernel that is chosen untuned: the portable one loses to both where it is not chosen.
_OTHERS = {"hopper": ("cublas",), "cublas": ("hopper",), "triton": ("cublas",)}

#: Half of a large tile: more programs, at as many stages in less shared memory.
NARROW = Tile(128, 64, 64, group=8, parts=4, num_warps=4, num_stages=4)

#: Where fragments of the operands are in registers too (mma, before Hopper), a large tile spills at 128 of them.
ROOMY = replace(LARGE, maxnreg=None)

#: Of 16-bit operands in aligned rows, with up to 228, 164 and 100 KiB of shared memory a processor.
TILES = {
    "large": (
        LARGE,
        replace(LARGE, group=16),
        replace(LARGE, num_stages=4),
        replace(LARGE, group=16, num_stages=4),
        NARROW,
        SMALL,
    ),
    "middle": (
        ROOMY,
        replace(ROOMY, group=16),
        replace(ROOMY, num_stages=4),
        replace(ROOMY, block_t=32, num_stages=5),
        NARROW,
        SMALL,
    ),
    "small": (
        ROOMY,
        replace(ROOMY, group=16),
        replace(ROOMY, block_t=32, num_stages=4),
        replace(NARROW, num_stages=3),
        SMALL,
        replace(SMALL, num_stages=3),
    ),
}
#: By compute capability; another has the middle set.
SHARED_MEMORY = {
    (8, 0): "middle",
    (8, 6): "small",
    (8, 9): "small",
    (9, 0): "large",
    (10, 0): "large",
    (10, 3): "large",
    (12, 0): "small",
}
#: Of operands that multiply in fp32, and of rows that are not aligned, on every device.
TILES_FP32 = (LARGE_FP32, replace(LARGE_FP32, group=16), replace(LARGE_FP32, num_stages=2), SMALL_FP32)


def candidates(slot: Slot, segments: Sequence[Segment], backend: str) -> list[Candidate]:
    """Return what may step ``slot`` from one pair of contiguous factors, the untuned choice first.

    Args:
        backend: another than ``"auto"`` has only the configurations of its own kernel.
    """
    default = choose_for(slot, segments, None, backend)
    others = _OTHERS.get(default, ()) if backend == "auto" else ()
    kernels = [default, *(kernel for kernel in others if can_step(kernel, slot, segments))]
    found = [candidate for kernel in kernels for candidate in _of_kernel(kernel, slot, segments)]
    return list(dict.fromkeys(found))


def _of_kernel(kernel: str, slot: Slot, segments: Sequence[Segment]) -> list[Candidate]:
    """The candidates of one kernel, what it takes by itself first."""
    if kernel == "hopper":
        tokens = segments[0][0].shape[0]
        chosen = choose_config(*slot.weight.shape, tokens, slot.element_bytes, slot.noise is not None)
        pairs = [(chosen, CONFIGS[chosen].group), *((name, group) for name in CONFIGS for group in GROUPS)]
        return [Candidate(kernel, replace(CONFIGS[name], group=group), f"{name} g{group}") for name, group in pairs]
    if kernel == "triton":
        return [Candidate(kernel, tile, _name(tile)) for tile in _tiles(slot, segments)]
    return [Candidate(kernel)]


def _tiles(slot: Slot, segments: Sequence[Segment]) -> list[Tile]:
    rows, columns = slot.weight.shape
    fp32 = segments[0][0].dtype is torch.float32
    aligned = rows % 16 == columns % 16 == 0
    tiles = [choose_tile(rows, columns, fp32=fp32, aligned=aligned)]
    if not aligned:
        own = UNALIGNED_FP32 if fp32 else UNALIGNED
        tiles += [replace(own, group=16), replace(own, num_stages=3), replace(own, num_warps=4)]
    elif fp32:
        tiles += TILES_FP32
    else:
        device = slot.weight.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        tiles += TILES[SHARED_MEMORY.get(capability, "middle")]
    return [in_blocks(tile, aligned=aligned) for tile in tiles] if slot.is_scaled else tiles


def _name(tile: Tile) -> str:
    registers = "" if tile.maxnreg is None else f" r{tile.maxnreg}"
    blocks = f"{tile.block_o}x{tile.block_i}x{tile.block_t}"
    return f"{blocks} g{tile.group} p{tile.parts} w{tile.num_warps} s{tile.num_stages}{registers}"
