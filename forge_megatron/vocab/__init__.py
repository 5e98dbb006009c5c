"""What is as long as the vocabulary: the embedding, whose gradient is a sum by token id."""

from forge_megatron.vocab.embedding import ForgeEmbedding, owned_embedding

__all__ = ["ForgeEmbedding", "owned_embedding"]
