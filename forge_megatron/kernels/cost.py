"""How long each way to step a weight is expected to take: what the choice by shape rests on.

A CTA of the Hopper kernel walks ``ceil(tiles / processors)`` tiles one after another, and each takes a time that
is affine in the tokens: its weight and states move (the constant), its gradient is multiplied (the slope). A few
tiles too many are another round of all processors, and that, not the tile's own speed, decides between
configurations and the GEMM of cuBLAS. The constants were fitted to ``recipes/bench/kernels.py`` on one H200
(``recipes/bench/results/h200_kernels.json``), and are no promise: only their order matters.
"""

from __future__ import annotations

import math

#: Bytes of a coordinate in a bf16 weight with two bf16 states, at which the constants were measured.
MEASURED_BYTES = 6

#: configuration -> rows and columns of a tile, µs that a tile's weight and states take, µs of 1024 tokens of a tile.
TILES = {
    "pp64": (64, 128, 2.2, 3.6),
    "pp128": (128, 128, 5.2, 5.3),
    "co256": (128, 256, 12.7, 10.1),
}
LAUNCH_US = 5.0
PROCESSORS = 132

#: cuBLAS into an fp32 scratch: launch, sustained rate of the GEMM, rate of the memory in the elementwise step.
CUBLAS_LAUNCH_US = 3.7
CUBLAS_FLOPS_PER_US = 7.6e8
STEP_BYTES_PER_US = 4.5e6


def hopper_us(configuration: str, rows: int, columns: int, tokens: int, element_bytes: int = MEASURED_BYTES) -> float:
    """µs of the Hopper kernel for an ``[rows, columns]`` gradient, with ``element_bytes`` of weight and states."""
    height, width, moved, multiplied = TILES[configuration]
    tiles = math.ceil(rows / height) * math.ceil(columns / width)
    each = moved * element_bytes / MEASURED_BYTES + multiplied * tokens / 1024
    return LAUNCH_US + math.ceil(tiles / PROCESSORS) * each


def cublas_us(rows: int, columns: int, tokens: int, element_bytes: int = MEASURED_BYTES) -> float:
    """µs of a GEMM into an fp32 scratch and one elementwise step, which reads the scratch again."""
    size = rows * columns
    multiplied = 2 * size * tokens / CUBLAS_FLOPS_PER_US
    return CUBLAS_LAUNCH_US + multiplied + size * (8 + 2 * element_bytes) / STEP_BYTES_PER_US


#: Multiplications and additions a µs: of the norm's kernel, and of a GEMM as small as a Gram matrix. Those of a GPU
#: were not fitted: they are the rates above with a margin, and those of a CPU are one core's.
NORM_FLOPS_PER_US = {("cuda", False): 6e8, ("cuda", True): 3e7}
GRAM_FLOPS_PER_US = {("cuda", False): 4e8, ("cuda", True): 4e7}
GRAM_LAUNCHES_US = {"cuda": 60.0}
CPU_FLOPS_PER_US = 5e4
CPU_CALLS_US = 100.0


def direct_norm_us(rows: int, columns: int, tokens: int, device: str, fp32: bool) -> float:
    """µs of a norm whose gradient is formed tile by tile."""
    return 2 * rows * columns * tokens / NORM_FLOPS_PER_US.get((device, fp32), CPU_FLOPS_PER_US)


def gram_norm_us(rows: int, columns: int, tokens: int, device: str, fp32: bool) -> float:
    """µs of a norm from two Gram matrices of the tokens, and of their estimate of its error."""
    multiplied = 2 * tokens * tokens * (rows + columns) / GRAM_FLOPS_PER_US.get((device, fp32), CPU_FLOPS_PER_US)
    return GRAM_LAUNCHES_US.get(device, CPU_CALLS_US) + multiplied
