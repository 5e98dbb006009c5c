"""Normalisation for the local layer spec under sequence parallelism.

megatron-core's ``WrappedTorchNorm`` refuses sequence parallelism, because nothing would reduce the
gradient of a weight that sees only its rank's part of the sequence. Megatron reduces exactly the
parameters marked ``sequence_parallel``: these norms carry that mark.
"""

from __future__ import annotations

import torch


def _mark(module: torch.nn.Module, sequence_parallel: bool) -> None:
    for parameter in module.parameters():
        parameter.sequence_parallel = sequence_parallel


class ParallelRMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with Megatron's constructor. Input ``[..., hidden_size]``."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_megatron) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config.sequence_parallel)


class ParallelLayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` with Megatron's constructor. Input ``[..., hidden_size]``."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_megatron) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config.sequence_parallel)


def norm_class(normalization: str) -> type[torch.nn.Module]:
    """The class for Megatron's ``TransformerConfig.normalization``."""
    classes = {"RMSNorm": ParallelRMSNorm, "LayerNorm": ParallelLayerNorm}
    if normalization not in classes:
        raise ValueError(f"normalization={normalization!r}: one of {sorted(classes)}")
    return classes[normalization]
