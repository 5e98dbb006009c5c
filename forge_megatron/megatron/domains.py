"""Dense weights and experts: which ranks hold the same weight, which hold parts of its gradient, which have the others.

Under expert parallelism Megatron steps experts by an optimizer of their own. Each rank has some experts, the tokens
of all data-parallel ranks come to them, and what is left to sum lies on the ranks of the expert data-parallel group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forge_megatron.coordinator import Buckets
from forge_megatron.megatron.switches import Facts


@dataclass(frozen=True)
class Domain:
    """Weights of one kind.

    Attributes:
        is_expert: experts under expert parallelism; False: everything else.
        data_group: the ranks that hold the same weights and each a part of their gradients.
        shard_group: of those, the ranks of one distributed optimizer instance, which share one copy of the states.
        tensor_group: the ranks that hold shards of the same weights.
        model_group: the ranks that together hold each weight once; norms are summed over it.
        named_group: of those, ranks that together have every weight's name once.
    """

    is_expert: bool
    data_group: ProcessGroup
    shard_group: ProcessGroup
    tensor_group: ProcessGroup
    model_group: ProcessGroup
    named_group: ProcessGroup

    def of(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [weight for weight in weights if is_expert(weight) == self.is_expert]

    def buckets(self, facts: Facts) -> Buckets | None:
        """How gradients are summed over ``data_group``; None: they are complete here. Scaled as :func:`scale` says."""
        if self.data_group.size() == 1:
            return None
        return Buckets(wire_dtype=torch.float32 if facts.any("grad_reduce_in_fp32") else None, average=False)

    def sharding(self, facts: Facts) -> dict[str, Any]:
        """Where states are, as options of ForgeOptimizer: by rows over ``shard_group``, or whole on every rank."""
        if not facts.any("use_distributed_optimizer") or self.data_group.size() == 1:
            return {}
        return {"sharding": "states", "shard_group": self.shard_group}


def is_expert(weight: Tensor) -> bool:
    """Megatron's own mark of a weight that the dense data-parallel ranks do not all hold."""
    return not getattr(weight, "allreduce", True)


def dense() -> Domain:
    return Domain(
        False,
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )


def experts() -> Domain:
    # Experts have names of their own on each expert-parallel rank; shards of one have the same.
    all_shards = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return Domain(
        True,
        parallel_state.get_expert_data_parallel_group(),
        parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        parallel_state.get_expert_tensor_parallel_group(),
        all_shards,
        all_shards,
    )


def sums_end_here() -> bool:
    """No other rank has a part of an owned weight's gradient, and no pipeline orders micro-batches."""
    sizes = dense().data_group.size(), experts().data_group.size()
    return parallel_state.get_pipeline_model_parallel_world_size() == 1 and sizes == (1, 1)


def scale(facts: Facts) -> float:
    """What Megatron's DDP multiplies every gradient by, an expert's too: one over the data-parallel ranks.

    An expert's gradient is the sum over the tokens of all of them, whatever its own data-parallel group. With
    ``calculate_per_token_loss`` it is divided by the tokens of all ranks at ``step()``.
    """
    if facts.any("calculate_per_token_loss"):
        return 1.0
    return 1.0 / parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def split(
    theirs: MegatronOptimizer, config: OptimizerConfig, model_chunks: Sequence[nn.Module], owned: Sequence[Tensor]
) -> tuple[list[tuple[Domain, MegatronOptimizer]], list[MegatronOptimizer]]:
    """Megatron's optimizer beside each of FORGE's, and those that stand alone, in Megatron's order.

    Args:
        theirs: of the parameters that FORGE does not step.
        config: of the optimizer.
        model_chunks: of this rank.
        owned: what FORGE steps; some dense weight is among it.
    """
    first, *rest = theirs.chained_optimizers if isinstance(theirs, ChainedOptimizer) else [theirs]
    paired = [(dense(), first)]
    if not any(map(is_expert, owned)):
        return paired, rest
    of_experts = [o for o in rest if any(group["is_expert_parallel"] for group in o.param_groups)]
    domain = experts()
    if not of_experts:
        # FORGE steps all of them: Megatron has no parameter left, and takes part in norms and checkpoints alone.
        of_experts = [
            megatron_optimizer._get_megatron_optimizer_based_on_param_groups(
                config,
                list(model_chunks),
                [],
                model_parallel_group=domain.model_group,
                intra_dist_opt_group=parallel_state.get_intra_distributed_optimizer_instance_group(),
            )
        ]
    paired.append((domain, of_experts[0]))
    return paired, [o for o in rest if o is not of_experts[0]]
