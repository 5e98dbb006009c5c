"""The softmax of a head's logits, one block of the vocabulary after another: normaliser first, then the gradient.

The loss of a token with logits z and label y over a vocabulary of V, ε the label smoothing, ζ the z-loss:
``lse(z) - (1 - ε) z_y - ε mean(z) + ζ lse(z)²`` (``torch.nn.functional.cross_entropy``; the z-loss is PaLM's,
section 5). Everything is fp32.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from .backend import resolve_backend


class Normaliser:
    """What one pass over the logits leaves of them.

    Args:
        targets: int64 ``[T]``; a target outside the vocabulary picks nothing.

    Attributes:
        picked: fp32 ``[T]``, each token's logit of its target.
        total: fp32 ``[T]``, the sum of each token's logits.
    """

    def __init__(self, targets: Tensor, backend: str):
        self.targets = targets
        self.backend = backend
        self.maximum = targets.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        self.sum_exp, self.picked, self.total = (torch.zeros_like(self.maximum) for _ in range(3))

    def add(self, logits: Tensor, bias: Tensor | None, start: int) -> None:
        """Takes in ``logits [T, B]`` (fp32, of the rows from ``start`` on; may be overwritten) plus ``bias [B]``."""
        _module(logits, self.backend).add(self, logits, bias, start)

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """Takes in what the other ranks of ``group`` have of the vocabulary."""
        own = self.maximum.clone()
        dist.all_reduce(self.maximum, dist.ReduceOp.MAX, group=group)
        sums = torch.stack([self.sum_exp * (own - self.maximum).exp(), self.picked, self.total])
        dist.all_reduce(sums, group=group)
        self.sum_exp, self.picked, self.total = sums

    def log_sum_exp(self) -> Tensor:
        """fp32 ``[T]``."""
        return self.maximum + self.sum_exp.log()


def logit_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log_sum_exp: Tensor,
    upstream: Tensor,
    start: int,
    *,
    vocabulary: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The gradient of the loss by a block of logits, ``[T, B]`` in ``dtype``.

    Args:
        logits: fp32 ``[T, B]``, of the vocabulary's rows from ``start`` on; may be overwritten.
        bias: ``[B]`` or None.
        targets: int64 ``[T]``.
        log_sum_exp: fp32 ``[T]``, of the whole vocabulary.
        upstream: fp32 ``[T]``, the gradient of what was made of the tokens' losses.
    """
    smooth = label_smoothing / vocabulary
    weights = upstream * (1 + 2 * z_loss * log_sum_exp), upstream * smooth, upstream * (1 - label_smoothing)
    return _module(logits, backend).gradient(logits, bias, targets, log_sum_exp, weights, start, dtype)


def _module(logits: Tensor, backend: str) -> ModuleType:
    name = "reference" if resolve_backend(logits.device, backend) == "reference" else "triton"
    return importlib.import_module(f".{name}_softmax", __package__)
