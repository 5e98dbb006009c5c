"""``‖dYᵀ X‖²`` from the Gram matrices of the tokens, where they are fewer than the features.

``‖dYᵀ X‖² = Σ (dY dYᵀ) ∘ (X Xᵀ)`` over all of a weight's tokens: uses and micro-batches have cross terms, so that
their segments are one token axis. It takes ``T² (O + I)`` multiplications where the gradient takes ``T O I``. The terms
of different tokens may cancel, and then the rounding of the large ones is left: the error is estimated from the same
matrices, and where it could reach the bound the gradient is formed after all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cost import direct_norm_us, gram_norm_us
from .lookups import is_lookup
from .slot import Segment

#: Largest relative error of the square; of the norm it is half of that.
TOLERANCE = 1e-5

#: fp32 roundings of an entry of a Gram matrix that the estimate allows for: in proportion to the entry (a tensor core
#: truncates, always to the same side), and at random, in proportion to the two tokens' lengths.
ROUNDINGS = 8.0

#: Below, squares of a token's components may not be fp32 numbers.
SMALLEST = 1e-30


def pays(segments: Sequence[Segment], rows: int, columns: int) -> bool:
    """Whether the Gram matrices are expected to be faster than forming the gradient."""
    if not segments or any(is_lookup(segment) for segment in segments):
        return False
    tokens = sum(dy.shape[0] for dy, _ in segments)
    dy, x = segments[0]
    device = dy.device.type
    if device == "cuda":
        # 16-bit factors have :mod:`.triton_norms`, and TF32 has not the digits.
        fp32 = dy.dtype is x.dtype is torch.float32
        if not fp32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
            return False
    return 0 < gram_norm_us(rows, columns, tokens, device) < direct_norm_us(rows, columns, tokens, device)


def gram_norm_sq(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Of ``Σ dYᵀ X`` over the segments, none of them a lookup.

    Returns:
        The sum of squares, 0-dim fp64, and whether its relative error is below ``TOLERANCE``, 0-dim bool; False where
        anything is not finite.
    """
    dy, dy_largest = _gram([dy for dy, _ in segments])
    x, x_largest = _gram([x for _, x in segments])
    terms = dy * x
    norm_sq = terms.sum(dtype=torch.float64)
    dy_sq, x_sq = dy.diagonal(), x.diagonal()
    at_random = torch.sqrt(dy_sq @ (x.square() @ dy_sq) + x_sq @ (dy.square() @ x_sq))
    error = ROUNDINGS * torch.finfo(torch.float32).eps * (terms.abs().sum() + at_random)
    sure = (error <= TOLERANCE * norm_sq) & (dy_largest > SMALLEST) & (x_largest > SMALLEST)
    return norm_sq * dy_largest.double() * x_largest.double(), sure


def _gram(factors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Inner products of all tokens, fp32 ``[T, T]``, over the largest of them, which is returned too."""
    joined = factors[0] if len(factors) == 1 else torch.cat(list(factors))
    joined = joined.float()
    products = joined @ joined.t()
    largest = products.diagonal().max()
    return products.div_(largest), largest
