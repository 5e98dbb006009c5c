"""A recipe's GPT model on megatron-core."""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from forge_megatron.megatron.attention import ForgeDotProductAttention
from forge_megatron.megatron.spec import get_gpt_layer_forge_spec
from launch import experts
from launch.config import Recipe
from launch.distributed import seed
from launch.dtypes import DTYPES
from launch.norm import norm_class

_ACTIVATIONS = {"swiglu": F.silu, "gelu": F.gelu}
_VOCAB_MULTIPLE = 128
_SEEDS_APART = 100  # of stages, as Megatron-LM has it


def padded_vocab_size(recipe: Recipe, tokenizer_size: int) -> int:
    """The vocabulary, rounded up to whole tiles.

    Not to tiles on every rank, as Megatron does: padding has logits too, and the loss would depend on the
    number of ranks.
    """
    multiple = math.lcm(_VOCAB_MULTIPLE, recipe.parallel.tensor)
    asked = recipe.model.vocab_size or tokenizer_size
    return (asked + multiple - 1) // multiple * multiple


def uses_transformer_engine(recipe: Recipe, on_cpu: bool) -> bool:
    if recipe.model.transformer_engine == "auto":
        return not on_cpu and importlib.util.find_spec("transformer_engine") is not None
    return recipe.model.transformer_engine == "always"


def transformer_config(recipe: Recipe, on_cpu: bool) -> TransformerConfig:
    m, p = recipe.model, recipe.parallel
    recompute = {"none": {}, "selective": {"recompute_granularity": "selective"}}
    recompute["full"] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups or m.num_attention_heads,
        kv_channels=m.kv_channels,
        normalization=m.normalization,
        layernorm_epsilon=m.norm_epsilon,
        gated_linear_unit=m.activation == "swiglu",
        activation_func=_ACTIVATIONS[m.activation],
        add_bias_linear=m.bias,
        qk_layernorm=m.qk_norm,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
        init_method_std=m.init_std,
        bf16=m.dtype == "bf16",
        params_dtype=DTYPES[m.dtype],
        attention_softmax_in_fp32=True,
        bias_activation_fusion=m.fusions and (m.bias or m.activation == "swiglu"),
        bias_dropout_fusion=m.fusions,
        tensor_model_parallel_size=p.tensor,
        sequence_parallel=p.sequence,
        context_parallel_size=p.context,
        cp_comm_type=p.context_comm if p.context > 1 else None,
        **_pipeline_options(recipe, on_cpu),
        use_cpu_initialization=m.cpu_initialization or on_cpu,
        gradient_accumulation_fusion=False,
        deterministic_mode=recipe.run.deterministic,
        calculate_per_token_loss=recipe.batch.per_token_loss,
        **recompute[m.recompute],
        **experts.fields(recipe, on_cpu),
    )


def _pipeline_options(recipe: Recipe, on_cpu: bool) -> dict:
    p = recipe.parallel
    interleaved = p.virtual_pipeline is not None
    return {
        "pipeline_model_parallel_size": p.pipeline,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline,
        "pipeline_dtype": DTYPES[recipe.model.dtype],
        # Of two interleaved stages each is before and behind the other: Megatron must send and receive by themselves.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": False,  # against a race in versions of torch before those that are supported
        # Gloo reads an output when it sends it, and the overlapping schedule has freed it by then.
        "deallocate_pipeline_outputs": not (interleaved and on_cpu),
    }


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """megatron-core's local layer, with norms that allow sequence parallelism and an attention
    that does not write out its scores."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    norm = norm_class(config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = ForgeDotProductAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    else:
        attention.q_layernorm = attention.k_layernorm = IdentityOp
    if config.num_moe_experts is None:
        return spec
    return experts.numbered(spec, in_one_tensor=config.moe_grouped_gemm)


def block_spec(
    recipe: Recipe, config: TransformerConfig, on_cpu: bool, vp_stage: int | None = None
) -> TransformerBlockSubmodules | ModuleSpec:
    if uses_transformer_engine(recipe, on_cpu):
        if recipe.optimizer.use_forge:
            return get_gpt_layer_forge_spec(config, use_transformer_engine=True)
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    return TransformerBlockSubmodules(
        layer_specs=[local_layer_spec(config)] * get_num_layers_to_build(config, vp_stage),
        layer_norm=norm_class(config.normalization),
    )


def build_chunks(recipe: Recipe, tokenizer_size: int, device: torch.device) -> list[GPTModel]:
    """This pipeline stage's chunks of the model on ``device``, the first layers first; without a pipeline the model.

    They are initialised from ``run.seed`` as the process groups are set up. With ``model.cpu_initialization`` the
    weights are the same for every parallel degree: a stage draws those of the stages before it as well, a chunk at
    a time, and lets them go.
    """
    parallel, on_cpu = recipe.parallel, device.type == "cpu"
    stage, count = parallel_state.get_pipeline_model_parallel_rank(), parallel.virtual_pipeline or 1
    config = transformer_config(recipe, on_cpu)
    chunks, last = [], parallel.pipeline * count - 1
    for place in range(last + 1):
        index, of_stage = divmod(place, parallel.pipeline)
        is_own = of_stage == stage
        if not is_own and len(chunks) == count:
            break
        vp_stage = index if parallel.virtual_pipeline else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(recipe, config, on_cpu, vp_stage),
            vocab_size=padded_vocab_size(recipe, tokenizer_size),
            max_sequence_length=recipe.data.sequence_length,
            pre_process=place == 0,
            post_process=place == last,
            # Megatron sums a tied pair over its stages when it is built, which only they may do.
            share_embeddings_and_output_weights=recipe.model.tied_head and is_own,
            position_embedding_type=recipe.model.position_embedding,
            rotary_base=recipe.model.rotary_base,
            vp_stage=vp_stage,
        )
        if is_own:
            chunks.append(chunk.to(device))
    if stage:
        seed(recipe.run.seed + _SEEDS_APART * stage)  # its layers must not drop what the first stage's drop
    return chunks
