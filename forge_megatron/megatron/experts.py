"""megatron-core's experts with one tensor a linear, ``[experts, O, I]``, of which one launch steps every expert.

megatron-core's own need a package: ``GroupedMLP`` (until 0.16) grouped_gemm, ``TEGroupedMLP`` Transformer Engine. These
multiply by torch's grouped product, and compute what ``SequentialMLP`` computes. They write its checkpoints too: either
reads the other's, on any number of expert-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_geglu import weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from forge_megatron.linear import ForgeGroupedLinear
from forge_megatron.megatron.rewriting import rewrite

_LINEARS = ("linear_fc1", "linear_fc2")
_EXTRA_STATE = re.compile(r"experts\.\d+\.linear_fc[12]\._extra_state$")
# What SequentialMLP's linears can do and these cannot.
_REFUSED = ("add_bias_linear", "fp8", "fp4", "use_te_activation_func", "moe_latent_size")


class ExpertLinear(ForgeGroupedLinear):
    """One linear of all experts that a rank has: torch's until an optimizer owns its weight.

    Attributes:
        is_expert: Megatron's mark.
        tp_group: the ranks that have shards of the same experts.
    """

    is_expert = True

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        *,
        partition_dim: int,
    ):
        # Megatron's initialisation takes the place of GroupedLinear's.
        nn.Module.__init__(self)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        shape = experts, out_features, in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=config.params_dtype))
        self.tp_group = tp_group
        self.weight.allreduce = config.expert_model_parallel_size == 1
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=partition_dim, stride=1)


# A copy of an attached module is one of its ``plain`` class.
ExpertLinear.plain = ExpertLinear


class GroupedExperts(MegatronModule):
    """The experts of one layer on one rank; takes the place of ``SequentialMLP`` in a layer's spec.

    Args:
        num_local_experts: experts on this rank.
        config: of the model.
        submodules: ignored; a spec's, of ``SequentialMLP``.
        pg_collection: its groups ``ep``, ``expt_tp`` and ``expt_dp``.
        name: ignored; megatron-core 0.19 gives one.

    Attributes:
        linear_fc1: ``[experts, F or 2 F, H]``, a rank's gate rows before its up rows.
        linear_fc2: ``[experts, H, F]``.

    Raises:
        NotImplementedError: a switch of ``config`` that is not built for them, by name.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ):
        super().__init__(config=config)
        _expect_supported(config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        features = config.moe_ffn_hidden_size // self.tp_group.size()
        hidden, halves = config.hidden_size, 2 if config.gated_linear_unit else 1
        make = partial(ExpertLinear, num_local_experts, config=config, tp_group=self.tp_group)
        self.linear_fc1 = make(hidden, halves * features, partition_dim=1)
        self.linear_fc2 = make(features, hidden, partition_dim=2)
        if config.perform_initialization:
            self.initialize()
        self.register_load_state_dict_post_hook(_forget_extra_states)

    def initialize(self) -> None:
        """Draws the weights as Megatron draws an expert's."""
        for linear, method, parts in self.methods():
            if self.config.use_cpu_initialization:
                for matrix in linear.weight.detach():
                    draw_shard(matrix, method, linear.weight.partition_dim - 1, parts, self.tp_group)
            else:
                _initialize_affine_weight_gpu(linear.weight, method, linear.weight.partition_dim, is_expert=True)

    def methods(self) -> list[tuple[ExpertLinear, Callable[[Tensor], Any], int]]:
        """Each linear, what initialises it, and of how many matrices below each other one expert's is made."""
        halves = 2 if self.config.gated_linear_unit else 1
        return [
            (self.linear_fc1, self.config.init_method, halves),
            (self.linear_fc2, self.config.output_layer_init_method, 1),
        ]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """As ``SequentialMLP``'s.

        Args:
            permuted_local_hidden_states: ``[T, H]``, in the order of the experts.
            tokens_per_expert: ``[experts]``, on any device.
            permuted_probs: ``[T]``.

        Returns:
            ``[T, H]`` and None, for a bias.
        """
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x = (probs.unsqueeze(-1) * x).to(x.dtype)
            probs = torch.ones_like(probs)
        counts = tokens_per_expert.to(x.device, non_blocking=True)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return self.linear_fc2(self._activate(self.linear_fc1(x, ends), probs), ends), None

    def _activate(self, x: Tensor, probs: Tensor) -> Tensor:
        config, probs = self.config, probs.unsqueeze(-1)
        function = config.activation_func
        if config.bias_activation_fusion:
            if function is F.silu:
                return weighted_bias_swiglu_impl(x, None, probs, config.activation_func_fp8_input_store)
            clamp = config.activation_func_clamp_value
            store = config.activation_func_fp8_input_store
            return weighted_bias_quick_geglu_impl(x, None, probs, store, config.glu_linear_offset, clamp)
        if config.gated_linear_unit:
            gate, up = x.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            activated = function(gate) * (up + config.glu_linear_offset)
        else:
            activated = function(x)
        return (activated * probs).to(x.dtype)

    def backward_dw(self) -> None:
        """Nothing is left to do: weight gradients are computed where backward passes."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """``SequentialMLP``'s keys and shards."""
        singleton = (metadata or {}).get("singleton_local_shards", False)
        replica = (0, 0, self.dp_group.rank())
        shards: dict[str, Any] = {}
        for (linear, _, parts), name in zip(self.methods(), _LINEARS, strict=True):
            weight = linear.weight
            build = partial(
                self._build, offsets=sharded_offsets, axis=weight.partition_dim - 1, parts=parts, singleton=singleton
            )
            merge = partial(_merge, shape=weight.shape)
            key = f"{prefix}experts.{name}.weight"
            shards[f"{prefix}{name}.weight"] = ShardedTensorFactory(key, weight, build, merge, replica)
            for number, offsets in self._numbered(sharded_offsets, singleton):
                state = f"experts.{number}.{name}" if singleton else f"experts.{name}"
                shards[f"{prefix}experts.{number}.{name}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}{state}._extra_state", offsets, (0, self.tp_group.rank(), self.dp_group.rank())
                )
        return shards

    def _numbered(self, offsets: tuple, singleton: bool) -> list[tuple[int, tuple]]:
        """The experts' numbers in the whole model, and the prepended axes of their shards."""
        first = self.ep_group.rank() * self.num_local_experts
        count = self.ep_group.size() * self.num_local_experts
        numbers = range(first, first + self.num_local_experts)
        return [(n, offsets if singleton else (*offsets, (len(offsets), n, count))) for n in numbers]

    def _build(
        self,
        key: str,
        experts: Tensor,
        replica_id,
        _,
        *,
        offsets: tuple,
        axis: int,
        parts: int,
        singleton: bool,
    ) -> list[ShardedTensor]:
        """One shard for each of ``parts`` of each expert, in the order in which they lie in memory."""
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        shards = []
        for matrix, (number, prepended) in zip(experts, self._numbered(offsets, singleton), strict=True):
            own = key.replace(".experts.linear_", f".experts.{number}.linear_") if singleton else key
            for part, piece in enumerate(matrix.chunk(parts)):
                apart = singleton and parts > 1
                place = (rank, ranks) if apart else (part * ranks + rank, parts * ranks)
                shards.append(
                    ShardedTensor.from_rank_offsets(
                        f"{own}_{'wv'[part]}" if apart else own,
                        piece,
                        *prepended,
                        (len(prepended) + axis, *place),
                        replica_id=replica_id,
                        prepend_axis_num=len(prepended),
                    )
                )
        return shards


def grouped(spec: Any, experts: type[GroupedExperts] = GroupedExperts) -> Any:
    """A layer's spec with ``experts`` in the place of ``SequentialMLP``."""
    return rewrite(spec, {SequentialMLP: experts})


@torch.no_grad()
def draw_shard(weight: Tensor, method: Callable[[Tensor], Any], dim: int, parts: int, group: ProcessGroup) -> None:
    """Draws a whole matrix on the CPU; this rank has its shard of each of ``parts``, gate and up or one.

    Args:
        weight: this rank's, ``[O, I]``.
        dim: of the shards.
        group: the ranks that have them.
    """
    shape = list(weight.shape)
    shape[dim] *= group.size()
    whole = torch.empty(shape)
    method(whole)
    shards = [part.chunk(group.size(), dim)[group.rank()] for part in whole.chunk(parts)]
    weight.copy_(torch.cat(shards))


def _expect_supported(config: TransformerConfig) -> None:
    for switch in _REFUSED:
        value = getattr(config, switch, None)
        if value:
            raise NotImplementedError(
                f"{switch}={value!r} is not built for experts in one tensor; turn it off, or moe_grouped_gemm"
            )
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ()):
        raise NotImplementedError(
            "recompute_modules: 'moe_act' is not built for experts in one tensor; take 'moe', of the layer"
        )
    fused = config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu)
    if config.bias_activation_fusion and not fused:
        raise ValueError("bias_activation_fusion: Megatron fuses experts' swiglu and quick_geglu only; turn it off")


def _merge(pieces: list[Tensor], shape: torch.Size) -> Tensor:
    return torch.cat(pieces).view(shape)


def _forget_extra_states(module: GroupedExperts, incompatible) -> None:
    """SequentialMLP's checkpoints have them; they are empty."""
    keys = incompatible.unexpected_keys
    keys[:] = [key for key in keys if not _EXTRA_STATE.search(key)]
