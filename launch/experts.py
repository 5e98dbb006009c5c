"""megatron-core's mixture of experts in a recipe's model."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from forge_megatron.megatron.spec import rewrite
from launch.config import Recipe


class NumberedExperts(SequentialMLP):
    """Experts whose initial weights do not depend on which rank has which; nor do others' on how many a rank has."""

    def __init__(self, num_local_experts: int, config, *args: Any, **keywords: Any):
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            super().__init__(num_local_experts, config, *args, **keywords)
            if config.use_cpu_initialization and config.perform_initialization:
                first = self.ep_group.rank() * num_local_experts
                for number, expert in enumerate(self.local_experts, first):
                    torch.manual_seed(seed + number)
                    halves = 2 if config.gated_linear_unit else 1
                    self._initialize(expert.linear_fc1.weight, config.init_method, halves)
                    self._initialize(expert.linear_fc2.weight, config.output_layer_init_method, 1)

    @torch.no_grad()
    def _initialize(self, weight: Tensor, method, parts: int) -> None:
        """Draws the whole weight; this rank has its shard of each of ``parts``, gate and up or one."""
        dim, shards = weight.partition_dim, self.tp_group.size()
        shape = list(weight.shape)
        shape[dim] *= shards
        whole = torch.empty(shape)
        method(whole)
        weight.copy_(
            torch.cat([part.chunk(shards, dim)[self.tp_group.rank()] for part in whole.chunk(parts, dim)], dim)
        )


def numbered(spec: Any) -> Any:
    """A layer's spec with :class:`NumberedExperts`.

    Where Transformer Engine is not installed, 0.16's router asks for a name that only it gives: it then multiplies by
    torch.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        moe_utils.te_general_gemm = None
    return rewrite(spec, {SequentialMLP: NumberedExperts})


def fields(recipe: Recipe, on_cpu: bool) -> dict[str, Any]:
    """Of Megatron's TransformerConfig; none for a model without experts."""
    model, parallel = recipe.model, recipe.parallel
    if model.num_experts is None:
        return {}
    # gloo has no collective of unequal parts, which all-to-all leaves to tensor-parallel shards of experts.
    dispatcher = "allgather" if on_cpu and parallel.tensor > 1 else "alltoall"
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.expert_topk,
        # The softmax of one score would be 1, whatever the router.
        "moe_router_pre_softmax": model.expert_topk == 1,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "moe_aux_loss_coeff": model.expert_aux_loss,
        "moe_token_dispatcher_type": dispatcher,
        "expert_model_parallel_size": parallel.expert,
    }
