"""What is as long as the vocabulary: the embedding, by token id, and the head, with its loss by blocks of rows."""

from forge_megatron.vocab.causal_lm import causal_lm_loss
from forge_megatron.vocab.cross_entropy import LinearCrossEntropy, linear_cross_entropy
from forge_megatron.vocab.embedding import ForgeEmbedding, owned_embedding

__all__ = ["ForgeEmbedding", "LinearCrossEntropy", "causal_lm_loss", "linear_cross_entropy", "owned_embedding"]
