"""megatron-core's mixture of experts where Transformer Engine is not installed."""

from __future__ import annotations

import importlib.util

from megatron.core.transformer.moe import moe_utils


def expect_no_transformer_engine() -> None:
    """0.16's router asks for a name that only Transformer Engine gives; without it, it multiplies by torch."""
    if importlib.util.find_spec("transformer_engine") is None:
        moe_utils.te_general_gemm = None
