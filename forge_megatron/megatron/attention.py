"""Causal core attention on torch's ``scaled_dot_product_attention``, which needs no Transformer Engine.

megatron-core's own ``DotProductAttention`` writes out the ``[heads, s, s]`` scores, and has no context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from forge_megatron.megatron import context
from forge_megatron.megatron.ring import expect_no_dropout, ring

#: Megatron's ``cp_comm_type``; None: it was not chosen.
_KINDS = {None: context.gathered, "allgather": context.gathered, "a2a": context.ulysses, "p2p": ring}


class ForgeDotProductAttention(torch.nn.Module):
    """Causal attention over the local heads, with the constructor of Megatron's ``DotProductAttention``.

    Args:
        config: Megatron's ``TransformerConfig``.
        attn_mask_type: ``AttnMaskType.causal``.
        softmax_scale: None: ``d ** -0.5``.
        cp_comm_type: under context parallelism ``"a2a"`` (:func:`forge_megatron.megatron.context.ulysses`),
            ``"all_gather"`` (:func:`forge_megatron.megatron.context.gathered`; the default), or ``"p2p"``
            (:func:`forge_megatron.megatron.ring.ring`).
        pg_collection: its ``cp`` is the context-parallel group; None: Megatron's.

    Raises:
        ValueError: a mask, window, softmax or kind of context parallelism that it does not have, heads that cannot
            be split over context ranks, or a dropout in a ring, by name.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_megatron: Any,
    ) -> None:
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal or config.window_size is not None:
            raise ValueError(
                f"attn_mask_type={attn_mask_type}, window_size={config.window_size}: "
                "ForgeDotProductAttention is causal over the whole sequence"
            )
        if config.softmax_type != "vanilla":
            raise ValueError(f"softmax_type={config.softmax_type!r}: ForgeDotProductAttention has 'vanilla'")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.layer_number = layer_number
        self.cp_group = None
        if config.context_parallel_size > 1:
            self._over_context = _kind(config, cp_comm_type, self.dropout)
            self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp

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
        """``query [s, b, heads, d]``, ``key`` and ``value [s, b, groups, d]`` to ``[s, b, heads * d]``.

        Under context parallelism ``s`` is this rank's two chunks of the sequence.

        Raises:
            ValueError: a mask (the causal one is implied), bias or packed sequence.
        """
        if attention_mask is not None or attention_bias is not None or packed_seq_params is not None:
            raise ValueError(
                "ForgeDotProductAttention takes no mask, bias or packed sequences; the causal mask is implied "
                "(--no-create-attention-mask-in-dataloader)"
            )
        settings = {"scale": self.scale, "dropout": self.dropout if self.training else 0.0}
        if self.cp_group is None:
            return context.attend(query, key, value, **settings).flatten(2)
        return self._over_context(query, key, value, self.cp_group, **settings).flatten(2)


def _kind(config: Any, cp_comm_type: str | None, dropout: float):
    kind = cp_comm_type if cp_comm_type is None else cp_comm_type.replace("_", "").lower()
    if kind not in _KINDS:
        raise ValueError(
            f"cp_comm_type={cp_comm_type!r} with context_parallel_size={config.context_parallel_size} needs "
            "Transformer Engine's attention; without it use --cp-comm-type p2p, a2a or all_gather"
        )
    if _KINDS[kind] is ring:
        expect_no_dropout(dropout)
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    if _KINDS[kind] is context.ulysses and heads % config.context_parallel_size:
        raise ValueError(
            f"cp_comm_type='a2a': context_parallel_size={config.context_parallel_size} does not divide the {heads} "
            "attention heads of a tensor-parallel rank; use --cp-comm-type all_gather"
        )
    return _KINDS[kind]
