"""Column- and row-parallel linears, and the vocabulary-parallel embedding, that step their weight inside backward.

Drop-ins for ``megatron.core.tensor_parallel``'s of megatron-core 0.16 to 0.19: same constructor, same
forward, same parameters and checkpoint keys. Where the weight is not owned by a FORGE optimizer, and while a
gradient hook is registered on it, they are Megatron's own modules, call for call.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from forge_megatron.linear import has_gradient_hook, owner_of
from forge_megatron.megatron.codes import with_values
from forge_megatron.megatron.function import owned_parallel_linear
from forge_megatron.vocab import owned_embedding


class _StepsInBackward:
    """Replaces the one method in which Megatron's linears multiply, and nothing else."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args, **kwargs) -> Tensor:
        owned = owner_of(weight)
        if owned is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        if has_gradient_hook(weight):
            # Formed for the hook, and stepped from .grad: an owned weight has no main_grad to add it to.
            kwargs["gradient_accumulation_fusion"] = False
            return super()._forward_impl(input, weight, *args, **kwargs)
        if kwargs.get("grad_output_buffer") is not None:
            raise NotImplementedError(
                f"{owned.name}: defer_embedding_wgrad_compute hands the output gradient to Megatron, which "
                "adds it to a main_grad that an owned weight does not have; turn it off"
            )
        return owned_parallel_linear(
            input,
            weight,
            kwargs["bias"],
            allreduce_dgrad=kwargs["allreduce_dgrad"],
            sequence_parallel=kwargs["sequence_parallel"],
            tp_group=kwargs["tp_group"],
        )

    def sharded_state_dict(self, *args, **kwargs):
        return with_values(super().sharded_state_dict(*args, **kwargs))

    def backward_dw(self) -> None:
        """Nothing is left to do: the weight was stepped, or its factors kept, in backward."""


class ForgeColumnParallelLinear(_StepsInBackward, ColumnParallelLinear):
    """``Y_i = X A_iᵀ``; under sequence parallelism X is gathered before the update, so it is complete."""


class ForgeRowParallelLinear(_StepsInBackward, RowParallelLinear):
    """``Y = Σ X_i A_iᵀ``; dY is whole on every rank, so the update is complete."""


class ForgeVocabParallelEmbedding(VocabParallelEmbedding):
    """This rank's rows are stepped from its tokens' ids and gradients; those of other ranks' rows are left out."""

    def forward(self, input_: Tensor) -> Tensor:
        if owner_of(self.weight) is None or has_gradient_hook(self.weight):
            return super().forward(input_)
        ids, outside = input_, None
        if self.tp_group.size() > 1:
            outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill_(outside, 0)
        embedded = owned_embedding(ids, self.weight, outside=outside)
        if self.reduce_scatter_embeddings:
            embedded = embedded.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(embedded, group=self.tp_group)
        if self.tp_group.size() > 1:
            return reduce_from_tensor_model_parallel_region(embedded, group=self.tp_group)
        return embedded
