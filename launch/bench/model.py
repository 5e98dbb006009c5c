"""Models by configuration only: random weights, made on the device; nothing is downloaded."""

from __future__ import annotations

import torch
from torch import nn

from launch.bench.spec import Shape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(shape: Shape, device: str, seed: int = 0) -> nn.Module:
    """A Hugging Face causal language model of this shape, in training mode.

    Raises:
        ValueError: an unknown kind or dtype.
    """
    import transformers

    if shape.dtype not in DTYPES:
        raise ValueError(f"model.dtype={shape.dtype!r}; use one of: {', '.join(DTYPES)}")
    common = {
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    decoder = {
        **common,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }
    if shape.kind == "llama":
        settings, kind = transformers.LlamaConfig(**decoder), transformers.LlamaForCausalLM
    elif shape.kind == "qwen3":
        settings, kind = transformers.Qwen3Config(**decoder), transformers.Qwen3ForCausalLM
    elif shape.kind == "gpt2":
        sizes = {"n_embd": shape.hidden_size, "n_layer": shape.num_hidden_layers, "n_head": shape.num_attention_heads}
        settings, kind = transformers.GPT2Config(**common, **sizes), transformers.GPT2LMHeadModel
    else:
        raise ValueError(f"model.kind={shape.kind!r}; use one of: llama, qwen3, gpt2")
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(DTYPES[shape.dtype])
    try:
        with torch.device(device):
            return kind(settings).train()
    finally:
        torch.set_default_dtype(before)
