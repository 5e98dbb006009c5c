"""Core attention on torch's scaled_dot_product_attention, for the layer spec without Transformer
Engine: megatron-core's own ``DotProductAttention`` writes out the [heads, s, s] scores."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor


class FlashCoreAttention(torch.nn.Module):
    """Causal attention over the local heads, with Megatron's core-attention constructor."""

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_megatron,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal or config.window_size is not None:
            raise ValueError(
                f"attn_mask_type={attn_mask_type}, window_size={config.window_size}: "
                "FlashCoreAttention is causal over the whole sequence"
            )
        if config.context_parallel_size != 1 or config.softmax_type != "vanilla":
            raise ValueError(
                f"context_parallel_size={config.context_parallel_size}, "
                f"softmax_type={config.softmax_type!r}: FlashCoreAttention has neither"
            )
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """``query [s, b, heads, d]``, ``key`` and ``value [s, b, groups, d]`` to
        ``[s, b, heads * d]``. The causal mask is implied: any other mask is refused."""
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError("FlashCoreAttention takes no mask, bias or packed sequences")
        grouped = query.size(2) != key.size(2)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
            enable_gqa=grouped,
        )
        s, b = context.size(2), context.size(0)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)
