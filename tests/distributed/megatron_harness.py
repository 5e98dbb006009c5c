"""Trains a small GPT in the processes of megatron_ranks with and without FORGE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from megatron_ranks import Workers as Workers
from megatron_ranks import layout as layout
from megatron_ranks import mesh_of_cpus
from megatron_ranks import run as run
from megatron_saving import load as load
from megatron_saving import load_schedule as load_schedule
from megatron_saving import owned_state as owned_state
from megatron_saving import save as save
from sharded_nets import whole

VOCAB, SEQUENCE, BATCH = 64, 16, 2


@dataclass
class Case:
    """One training run.

    Attributes:
        forge: None for Megatron's own optimizer, else the keyword arguments of ForgeOptions.
        model, optimizer, ddp: further fields of the three Megatron configs.
        fused_head: with FORGE, output layer and loss are one.
        own_batches: each data-parallel rank has batches of its own.
        fsdp2: TorchFullyShardedDataParallel in the place of DistributedDataParallel.
        tied: head and embedding share their weight.
    """

    steps: int = 5
    micro_batches: int = 1
    clip: float = 1.0
    lr: float = 1e-2
    sequence_parallel: bool = False
    tied: bool = False
    forge: dict[str, Any] | None = None
    fused_head: bool = False
    own_batches: bool = False
    dtype: torch.dtype = torch.float32
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    scheduled: bool = True
    fsdp2: bool = False

    def with_forge(self, **options: Any) -> Case:
        return replace(self, forge=options)


def transformer_config(case: Case):
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": case.layers,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "params_dtype": case.dtype,
            "pipeline_dtype": case.dtype,
            "bf16": case.dtype is torch.bfloat16,
            "fp16": case.dtype is torch.float16,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "batch_p2p_sync": False,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "sequence_parallel": case.sequence_parallel,
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "init_method_std": 0.1,
            # With Transformer Engine's layers FSDP2 also shards each column-parallel linear, the output layer alone.
            **({"transformer_impl": "local"} if case.fsdp2 else {}),
            **case.model,
        }
    )


def layer_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from forge_megatron.megatron.attention import ForgeDotProductAttention
    from launch import experts
    from launch.norm import norm_class

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    norm = norm_class(config.normalization)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    spec.submodules.self_attention.submodules.core_attention = ForgeDotProductAttention
    if config.num_moe_experts is None:
        return spec
    return experts.numbered(spec, in_one_tensor=config.moe_grouped_gemm)


def build_model(case: Case, seed: int = 7):
    """A GPT on this rank whose initial weights are the same for every tensor-parallel size."""
    torch.manual_seed(seed)
    return _model(case, transformer_config(case))


def _model(case: Case, config, **stage: Any):
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from launch.norm import norm_class

    extra = dict(stage)
    if config.mtp_num_layers:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        extra["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer_spec(config), use_transformer_engine=False)
    layers = get_num_layers_to_build(config, vp_stage=stage.get("vp_stage"))
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec(config)] * layers, layer_norm=norm_class(config.normalization)
        ),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        **extra,
    )
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def build_chunks(case: Case, seed: int = 7) -> list:
    """This pipeline stage's chunks of the GPT, with the weights that one process would begin with."""
    from megatron.core import parallel_state

    from forge_megatron.megatron.conversion import global_names

    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if stages == 1:
        return [build_model(case, seed)]
    torch.manual_seed(seed)
    one_process = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    whole = _model(replace(case, tied=False), transformer_config(replace(case, model={**case.model, **one_process})))
    names = global_names(whole)
    initial = {names[name]: parameter for name, parameter in whole.named_parameters()}
    config = transformer_config(case)
    count = config.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for index in range(count):
        virtual = {} if count == 1 else {"vp_stage": index}
        first, last = stage == 0 and index == 0, stage == stages - 1 and index == count - 1
        chunk = _model(case, config, pre_process=first, post_process=last, **virtual)
        known = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            tied = case.tied and name == "output_layer.weight"
            parameter.data.copy_(initial["embedding.word_embeddings.weight" if tied else known[name]].data)
        chunks.append(chunk)
    return chunks


def context_parts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch's two chunks of the sequence on this context rank, by Megatron."""
    from megatron.core import parallel_state, utils

    split = utils.get_batch_on_this_cp_rank
    # megatron-core 0.19 asks whether the context groups differ by sample.
    keywords = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(split).parameters else {}
    whole = {name: value.contiguous() for name, value in batch.items()}
    return split(whole, cp_group=parallel_state.get_context_parallel_group(), **keywords)


def over_context(values: torch.Tensor) -> torch.Tensor:
    """The sum over the context ranks, which have a part of each sequence."""
    from megatron.core import parallel_state

    torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values


def sharded_config(case: Case):
    from megatron.core.distributed import TorchFullyShardedDataParallelConfig

    return TorchFullyShardedDataParallelConfig(**case.ddp)


def sharded_model(config, ddp_config, model):
    """FSDP2 by Megatron's wrapper."""
    from megatron.core.distributed import TorchFullyShardedDataParallel

    mesh_of_cpus()
    chunk = TorchFullyShardedDataParallel(config, ddp_config, model)
    if "force_all_reduce" not in signature(chunk.finish_grad_sync).parameters:
        # megatron-core 0.16 hands it over all the same.
        chunk.finish_grad_sync = lambda force_all_reduce=False: None
    return chunk


class Run:
    """Model, DDP, optimizer and schedule of one case."""

    def __init__(self, case: Case, edit: Callable | None = None):
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        self.case = case
        models = build_chunks(case)
        self.model = models[0]
        self.models = models
        if edit is not None:
            edit(self.model)
        config = self.model.config
        optimizer_config = OptimizerConfig(
            lr=case.lr,
            min_lr=0.0,
            weight_decay=0.1,
            clip_grad=case.clip,
            bf16=case.dtype is torch.bfloat16,
            fp16=case.dtype is torch.float16,
            params_dtype=case.dtype,
            **{"optimizer": "adam", **case.optimizer},
        )
        ddp_config = (
            sharded_config(case) if case.fsdp2 else DistributedDataParallelConfig(grad_reduce_in_fp32=True, **case.ddp)
        )
        wrapper = sharded_model if case.fsdp2 else DistributedDataParallel
        if case.forge is not None:
            from forge_megatron.megatron import ForgeOptions, get_forge_optimizer, prepare

            prepare(models, ddp_config, optimizer_config, fused_head=case.fused_head)
        self.chunks = [
            wrapper(config, ddp_config, model if case.dtype is torch.float32 else Float16Module(config, model))
            for model in models
        ]
        self.chunk = self.chunks[0]
        if case.forge is not None:
            self.optimizer = get_forge_optimizer(
                optimizer_config,
                self.chunks,
                options=ForgeOptions(**case.forge),
                num_microbatches=case.micro_batches,
                use_gloo_process_groups=False,
            )
        else:
            self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks, use_gloo_process_groups=False)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = [chunk.no_sync for chunk in self.chunks] if len(models) > 1 else self.chunk.no_sync
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=case.lr,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=30,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        if case.scheduled:
            self.schedule.step(1)  # the first learning rate of a warm-up from 0 moves nothing
        self.generator = torch.Generator().manual_seed(
            99 + (parallel_state.get_data_parallel_rank() if case.own_batches else 0)
        )

    def batch(self) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCAB // 2, (BATCH, SEQUENCE + 1), generator=self.generator)
        mask = (torch.rand(BATCH, SEQUENCE, generator=self.generator) < 0.8).float()
        positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
        whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "mask": mask, "positions": positions}
        return context_parts(whole)

    def reports(self, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Forward and backward of the micro-batches; of each, on the last stage, the loss's sum and its tokens."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        per_token = self.case.model.get("calculate_per_token_loss", False)

        def forward_step(batches, model):
            batch = next(batches)
            losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])

            def loss_function(losses):
                total, tokens = (losses.float() * batch["mask"]).sum(), batch["mask"].sum()
                report = over_context(torch.stack([total.detach().clone(), tokens]))
                if per_token:
                    return total, tokens.to(torch.int), report
                return total / report[1], report

            return losses, loss_function

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(self) -> float:
        """Forward and backward of all micro-batches; returns the mean loss of the last stage, 0 on the others."""
        batches = [self.batch() for _ in range(self.case.micro_batches)]
        self.zero()
        reports = self.reports(batches)
        if not reports:
            return 0.0
        total, tokens = torch.stack(reports).sum(0).tolist()
        return total / tokens

    def step(self) -> tuple[bool, float | None]:
        success, norm, _ = self.optimizer.step()
        if success:
            self.schedule.step(1)
        return success, None if norm is None else float(norm)

    def train(self, steps: int | None = None) -> dict[str, Any]:
        losses, norms = [], []
        for _ in range(steps or self.case.steps):
            losses.append(self.backward())
            norms.append(self.step()[1])
        return {"losses": losses, "norms": norms, "weights": self.weights()}

    def weights(self) -> dict[str, torch.Tensor]:
        """By the name that one process has for each."""
        from forge_megatron.megatron.conversion import global_names

        if self.case.ddp.get("overlap_param_gather"):
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)  # otherwise the next forward gathers them
        return {
            known[name]: whole(p).float()
            for model in self.models
            for known in [global_names(model)]
            for name, p in model.named_parameters()
        }


def train(case: Case) -> dict[str, Any]:
    return Run(case).train()


def train_both(case: Case, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Megatron's own optimizer, and FORGE, from the same weights on the same batches."""
    return train(case), train(case.with_forge(**options))


def poison(session: Run, value: float, pair: int = 0) -> None:
    """Writes ``value`` into the pending gradient of one owned weight, behind autograd's back.

    Args:
        pair: whose, by its place in the chain: 0 of dense weights, 1 of experts.
    """
    owned = list(session.optimizer.chained_optimizers[pair].forge.owned.values())[-1]
    factors = owned.factors
    (factors.kept[0].dy if factors.kept else factors.accumulator).data[0, 0] = value


def step_from_grad(session: Run) -> None:
    """The fallback: a hook that only looks makes every owned weight one that is stepped from ``.grad``."""
    for pair in session.optimizer.chained_optimizers:
        for weight in pair.forge.owned:
            weight.register_hook(lambda grad: None)


def gap(first: list[float], second: list[float]) -> float:
    """The largest difference of two curves; raises if they have different lengths."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
