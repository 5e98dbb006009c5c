"""Layer specs with FORGE's linears, with and without Transformer Engine.

Without Transformer Engine a spec is not needed: :func:`forge_megatron.megatron.prepare` converts any built
model; but under context parallelism megatron-core's local attention cannot be built, and the spec has Transformer
Engine's where that is installed and there is a GPU for it, and FORGE's elsewhere.
Transformer Engine's ``TELayerNormColumnParallelLinear`` fuses the norm into the linear, so FORGE takes
the layout of megatron-core's local spec, norm and linear apart, with Transformer Engine's norm and attention
in it; the local spec's ``sharded_state_dict_keys_map`` keeps the fused names in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from forge_megatron.megatron.attention import ForgeDotProductAttention
from forge_megatron.megatron.experts import grouped
from forge_megatron.megatron.layers import ForgeColumnParallelLinear, ForgeRowParallelLinear
from forge_megatron.megatron.rewriting import rewrite

_LINEARS: dict[Any, type] = {
    ColumnParallelLinear: ForgeColumnParallelLinear,
    RowParallelLinear: ForgeRowParallelLinear,
}


class ForgeSpecProvider(LocalSpecProvider):
    """megatron-core's local provider with FORGE's linears, for the functions that take a backend."""

    def column_parallel_linear(self) -> type:
        return ForgeColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return ForgeRowParallelLinear


def get_gpt_layer_forge_spec(config: TransformerConfig, *, use_transformer_engine: bool = False) -> ModuleSpec:
    """A transformer layer with FORGE's linears; with ``num_moe_experts`` its MLPs are a ``SequentialMLP``, and with
    ``moe_grouped_gemm`` too a :class:`~forge_megatron.megatron.experts.GroupedExperts`.

    Args:
        config: the model's config; its norm, qk-norm, multi-latent-attention and context-parallel fields are read.
        use_transformer_engine: take Transformer Engine's norm and attention; otherwise its attention alone, and that
            only under context parallelism of 16-bit parameters on a GPU, where it is installed.

    Raises:
        ModuleNotFoundError: Transformer Engine is asked for and not installed.
        NotImplementedError: a model of which only some layers have experts.
    """
    if config.num_moe_experts is not None:
        _expect_experts_in_every_layer(config)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
    )
    if config.moe_grouped_gemm:
        spec = grouped(spec)
    if not use_transformer_engine:
        context = {DotProductAttention: _over_context(config)} if config.context_parallel_size > 1 else {}
        return rewrite(spec, {**_LINEARS, **context})
    if not transformer_engine.HAVE_TE:
        raise ModuleNotFoundError(
            "transformer_impl='transformer_engine' needs transformer_engine (pip install transformer-engine[pytorch]), "
            "or use transformer_impl='local'"
        )
    local = LocalSpecProvider()
    norms = {local.layer_norm(rms_norm=rms, for_qk=qk) for rms in (False, True) for qk in (False, True)}
    engine = {
        **dict.fromkeys(norms, transformer_engine.TENorm),
        DotProductAttention: transformer_engine.TEDotProductAttention,
    }
    return rewrite(spec, {**_LINEARS, **engine})


def _over_context(config: TransformerConfig) -> type:
    """The core attention of context-parallel ranks; Transformer Engine's has no kernel for fp32."""
    has_engine = transformer_engine.HAVE_TE and torch.cuda.is_available() and config.params_dtype is not torch.float32
    return transformer_engine.TEDotProductAttention if has_engine else ForgeDotProductAttention


def _expect_experts_in_every_layer(config: TransformerConfig) -> None:
    frequency = config.moe_layer_freq
    if any(layer != 1 for layer in (frequency if isinstance(frequency, list) else [frequency])):
        raise NotImplementedError(
            f"moe_layer_freq={frequency}: this is the spec of one layer, of which some would have experts and others "
            "not; build the model from megatron-core's get_gpt_decoder_block_spec, whose linears prepare() converts"
        )


def transformer_engine_layer_spec(model_config: Any) -> ModuleSpec:
    """``GPTModelConfig.transformer_layer_spec`` of megatron.training 0.19."""
    return get_gpt_layer_forge_spec(model_config.transformer, use_transformer_engine=True)


def local_layer_spec(model_config: Any) -> ModuleSpec:
    """The same without Transformer Engine."""
    return get_gpt_layer_forge_spec(model_config.transformer)
