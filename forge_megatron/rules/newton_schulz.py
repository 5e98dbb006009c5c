"""Newton-Schulz iteration: the polar factor of a matrix, approximately, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

#: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): chosen for the slope at
#: 0, so five steps bring every singular value into about [0.7, 1.2], not to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

#: What everything is rounded to, from the matrix on.
NS_DTYPE = torch.bfloat16


def newton_schulz(matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Returns ``p(p(... X))`` of ``X = matrix / |matrix|_F`` with ``p(X) = a X + (b A + c A^2) X``, ``A = X X^T``.

    In bf16, and on the wide side, as ``torch.optim.Muon`` does.

    Args:
        matrix: ``[..., O, I]``; leading dimensions are a batch.
        steps: number of iterations.
        coefficients: ``(a, b, c)``.
        eps: smallest norm that is divided by.

    Returns:
        bf16 ``[..., O, I]``; all NaN for a matrix with any entry that is not finite.
    """
    a, b, c = coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.to(NS_DTYPE)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply, multiply_add = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.matmul, torch.baddbmm)
    for _ in range(steps):
        gram = multiply(x, x.mT)
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
