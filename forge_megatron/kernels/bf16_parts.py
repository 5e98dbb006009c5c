"""A product of fp32 factors as one of bf16 parts, which tensor cores multiply.

Three bf16 numbers hold the 24 bits of an fp32 one: ``x = x1 + x2 + x3``, each at most 2^-8 of the one before. Of the
nine products of parts the six largest are taken, on one longer token axis: what is left out of a product ``a b`` is
below ``2^-25 |a b|``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Which part of the left factor meets which of the right one, the smallest products first.
PAIRS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))


def in_bf16(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``(left', right')``, bf16 ``[6 k, O]`` and ``[6 k, I]``, with ``left'^T right'`` equal to ``left^T right``.

    Args:
        left, right: fp32 ``[k, O]`` and ``[k, I]``, finite.
    """
    of_left, of_right = _parts(left), _parts(right)
    return torch.cat([of_left[i] for i, _ in PAIRS]), torch.cat([of_right[j] for _, j in PAIRS])


def _parts(x: Tensor) -> list[Tensor]:
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return parts
