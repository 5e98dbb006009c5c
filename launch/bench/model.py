"""Models by configuration only: random weights, made on the device; nothing is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from launch.bench import liger
from launch.bench.shapes import Shape

KINDS = {"llama": "Llama", "qwen3": "Qwen3", "gpt2": "GPT2"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(shape: Shape, device: str, seed: int = 0) -> nn.Module:
    """A Hugging Face causal language model of this shape, in training mode.

    Raises:
        ValueError: an unknown kind or dtype, or one that has no kernels of Liger's and is to have them.
    """
    if shape.dtype not in DTYPES:
        raise ValueError(f"dtype={shape.dtype!r}; use one of: {', '.join(DTYPES)}")
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
    if shape.kind == "gpt2":
        decoder = {
            **common,
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_hidden_layers,
            "n_head": shape.num_attention_heads,
        }
    configuration, kind = classes(shape.kind)
    settings = configuration(**decoder)
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(DTYPES[shape.dtype])
    try:
        with torch.device(device):
            model = kind(settings).train()
    finally:
        torch.set_default_dtype(before)
    if shape.liger:
        liger.apply(model)
    return model


@contextmanager
def _without_torchao() -> Iterator[None]:
    """Inside, torchao is not to be found.

    transformers imports it wherever it is installed, which takes seconds and asks for the GPU; a process that is to be
    forked must not do that. Only torchao's own arm imports it.
    """
    known = sys.modules.get("torchao")
    sys.modules["torchao"] = known
    try:
        yield
    finally:
        if known is None:
            del sys.modules["torchao"]


def classes(kind: str) -> tuple[type, type]:
    """transformers' configuration and model of a kind."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; use one of: {', '.join(KINDS)}")
    head = "LMHeadModel" if kind == "gpt2" else "ForCausalLM"
    with _without_torchao():
        import transformers

        return getattr(transformers, f"{KINDS[kind]}Config"), getattr(transformers, f"{KINDS[kind]}{head}")


def warm() -> None:
    """Imports what :func:`build` would."""
    for kind in KINDS:
        classes(kind)
