"""Models by their numbers, under the names that benches use. No weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer; Hugging Face's names."""

    kind: str = "llama"  # or qwen3, gpt2; gpt through Megatron only
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 512
    tie_word_embeddings: bool = False
    dtype: str = "bf16"  # or fp32
    liger: bool = False  # Liger's kernels in place of the model's own


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> Shape:
    return Shape("qwen3", hidden, intermediate, layers, heads, 8, 128, 151936, tied)


def _gpt(layers: int, hidden: int, head_dim: int = 64) -> Shape:
    heads = hidden // head_dim
    return Shape("gpt", hidden, 4 * hidden, layers, heads, heads, head_dim, 64000, tie_word_embeddings=True)


#: "tiny-*" are for rehearsals on a CPU; the dtype is theirs, the others' is bf16.
SHAPES: dict[str, Shape] = {
    "tiny-llama": Shape("llama", 64, 96, 2, 2, 1, 32, 128, dtype="fp32"),
    "tiny-qwen3": Shape("qwen3", 64, 96, 2, 2, 1, 32, 128, tie_word_embeddings=True, dtype="fp32"),
    "tiny-gpt": Shape("gpt", 64, 96, 2, 4, 4, 16, 128, tie_word_embeddings=True, dtype="fp32"),
    "gpt2": Shape("gpt2", 768, 3072, 12, 12, 12, 64, 50257, tie_word_embeddings=True),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    # Appendix N's, by layers and width: N.2's four, N.3's, and N.4's, whose MLPs are experts. The parameters that N.2
    # counts on a rank say that the vocabulary is of 64000; heads are of 64 where it gives no number of them.
    "gpt-24x2048": _gpt(24, 2048),
    "gpt-24x2560": _gpt(24, 2560),
    "gpt-24x4096": _gpt(24, 4096),
    "gpt-32x2560": _gpt(32, 2560),
    "gpt-20x3072": _gpt(20, 3072, 128),
    "gpt-12x2048": _gpt(12, 2048),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
}


def get(name: str) -> Shape:
    """Raises ``ValueError`` that lists the shapes."""
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]
