"""megatron-core's mixture of experts in a recipe's model."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP

from forge_megatron.megatron.experts import GroupedExperts, draw_shard, grouped
from forge_megatron.megatron.rewriting import rewrite
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
                    fc1, fc2 = expert.linear_fc1.weight, expert.linear_fc2.weight
                    draw_shard(fc1, config.init_method, 0, halves, self.tp_group)
                    draw_shard(fc2, config.output_layer_init_method, 1, 1, self.tp_group)


class NumberedGroupedExperts(GroupedExperts):
    """The same in one tensor, with the same initial weights."""

    def initialize(self) -> None:
        if not self.config.use_cpu_initialization:
            super().initialize()
            return
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            first = self.ep_group.rank() * self.num_local_experts
            for index in range(self.num_local_experts):
                torch.manual_seed(seed + first + index)
                for linear, method, parts in self.methods():
                    matrix = linear.weight.detach()[index]
                    draw_shard(matrix, method, linear.weight.partition_dim - 1, parts, self.tp_group)


def numbered(spec: Any, *, in_one_tensor: bool = False) -> Any:
    """A layer's spec with :class:`NumberedExperts`, or :class:`NumberedGroupedExperts`.

    Where Transformer Engine is not installed, 0.16's router asks for a name that only it gives: it then multiplies by
    torch.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        moe_utils.te_general_gemm = None
    return grouped(spec, NumberedGroupedExperts) if in_one_tensor else rewrite(spec, {SequentialMLP: NumberedExperts})


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
        "moe_grouped_gemm": model.expert_grouped,
        "expert_model_parallel_size": parallel.expert,
    }
