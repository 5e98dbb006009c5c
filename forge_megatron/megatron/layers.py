"""Column- and row-parallel linears that step their weight inside backward.

Drop-ins for ``megatron.core.tensor_parallel``'s of megatron-core 0.16 to 0.19: same constructor, same
forward, same parameters and checkpoint keys. Where the weight is not owned by a FORGE optimizer they are
Megatron's own linears, call for call.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from forge_megatron.linear import owner_of
from forge_megatron.megatron.function import owned_parallel_linear


class _StepsInBackward:
    """Replaces the one method in which Megatron's linears multiply, and nothing else."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args, **kwargs) -> Tensor:
        owned = owner_of(weight)
        if owned is None:
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

    def backward_dw(self) -> None:
        """Nothing is left to do: the weight was stepped, or its factors kept, in backward."""


class ForgeColumnParallelLinear(_StepsInBackward, ColumnParallelLinear):
    """``Y_i = X A_iᵀ``; under sequence parallelism X is gathered before the update, so it is complete."""


class ForgeRowParallelLinear(_StepsInBackward, RowParallelLinear):
    """``Y = Σ X_i A_iᵀ``; dY is whole on every rank, so the update is complete."""
