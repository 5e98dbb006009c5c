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

#: configuration -> rows and columns of a tile, µs that a tile's weight and states take, µs of 1024 tokens of a tile,
#: µs of its random bits.
TILES = {
    "pp64": (64, 128, 2.2, 3.6, 1.9),
    "pp128": (128, 128, 5.2, 5.3, 3.6),
    "co256": (128, 256, 12.7, 10.1, 5.9),
}
LAUNCH_US = 5.0
PROCESSORS = 132

#: cuBLAS into an fp32 scratch: launch, sustained rate of the GEMM, rate of the memory in the elementwise step.
CUBLAS_LAUNCH_US = 3.7
CUBLAS_FLOPS_PER_US = 7.6e8
STEP_BYTES_PER_US = 4.5e6
RANDOM_WORDS_PER_US = 2.5e6


def hopper_us(
    configuration: str,
    rows: int,
    columns: int,
    tokens: int,
    element_bytes: int = MEASURED_BYTES,
    stochastic: bool = False,
    experts: int = 1,
) -> float:
    """µs of the Hopper kernel for an ``[rows, columns]`` gradient, with ``element_bytes`` of weight and states.

    Of several experts' gradients, which share the tokens, each is taken to have as many.
    """
    height, width, moved, multiplied, rounded = TILES[configuration]
    tiles = experts * math.ceil(rows / height) * math.ceil(columns / width)
    multiplied *= tokens / experts / 1024
    each = moved * element_bytes / MEASURED_BYTES + multiplied + (rounded if stochastic else 0.0)
    return LAUNCH_US + math.ceil(tiles / PROCESSORS) * each


def cublas_us(
    rows: int, columns: int, tokens: int, element_bytes: int = MEASURED_BYTES, stochastic: bool = False
) -> float:
    """µs of a GEMM into an fp32 scratch and one elementwise step, which reads the scratch again."""
    size = rows * columns
    multiplied = 2 * size * tokens / CUBLAS_FLOPS_PER_US
    rounded = size / RANDOM_WORDS_PER_US if stochastic else 0.0
    return CUBLAS_LAUNCH_US + multiplied + size * (8 + 2 * element_bytes) / STEP_BYTES_PER_US + rounded


#: Multiplications and additions a µs: of a norm whose fp32 gradient is formed, and of a GEMM as small as a Gram matrix.
NORM_FLOPS_PER_US = {"cuda": 3e7, "cpu": 5e4}
GRAM_FLOPS_PER_US = {"cuda": 4e7, "cpu": 5e4}
GRAM_CALLS_US = {"cuda": 400.0, "cpu": 100.0}

#: The same of 16-bit factors, for many weights in one launch, and the tokens that a tile has beyond its triangle.
FORMED_FLOPS_PER_US = 4.7e8
GRAMS_FLOPS_PER_US = 4.5e8
GRAMS_TILE = 128


def direct_norm_us(rows: int, columns: int, tokens: int, device: str) -> float:
    """µs of a norm whose gradient is formed tile by tile, from fp32 factors."""
    return 2 * rows * columns * tokens / NORM_FLOPS_PER_US[device]


def gram_norm_us(rows: int, columns: int, tokens: int, device: str) -> float:
    """µs of a norm from two Gram matrices of the tokens, and of their estimate of its error, from fp32 factors."""
    return GRAM_CALLS_US[device] + 2 * tokens * tokens * (rows + columns) / GRAM_FLOPS_PER_US[device]


def formed_norm_us(rows: int, columns: int, tokens: int) -> float:
    """µs of a norm whose gradient is formed, among those of other weights, from 16-bit factors."""
    return 2 * rows * columns * tokens / FORMED_FLOPS_PER_US


def grams_norm_us(rows: int, columns: int, tokens: int) -> float:
    """µs of a norm from one triangle of each of two Gram matrices, among those of other weights."""
    return tokens * (tokens + GRAMS_TILE) * (rows + columns) / GRAMS_FLOPS_PER_US
