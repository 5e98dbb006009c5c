"""Megatron's optimizer and learning-rate schedule for a recipe."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from launch.config import Recipe, RecipeError
from launch.dtypes import DTYPES


def keeps_master(recipe: Recipe) -> bool:
    """Whether the weights have an fp32 master copy, with or without forge."""
    return recipe.optimizer.recipe == "fp32-master"


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    o = recipe.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.eps,
        clip_grad=o.clip_grad,
        bf16=recipe.model.dtype == "bf16" and keeps_master(recipe),
        params_dtype=DTYPES[recipe.model.dtype],
        use_distributed_optimizer=recipe.parallel.distributed_optimizer,
    )


def ddp_config(recipe: Recipe, overlap_grad_reduce: bool = False) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=keeps_master(recipe),
        overlap_grad_reduce=overlap_grad_reduce,
        use_distributed_optimizer=recipe.parallel.distributed_optimizer,
    )


def wrap_and_optimize(
    recipe: Recipe, models: list, overlap_grad_reduce: bool = False
) -> tuple[list, MegatronOptimizer]:
    """The model chunks as Megatron's schedules take them, and their optimizer: Megatron's, or with
    ``optimizer.use_forge`` Megatron's with FORGE stepping the linears.

    Args:
        recipe: degrees and hyperparameters.
        models: this rank's chunks.
        overlap_grad_reduce: of Megatron's DDP, during the backward that completes its buckets.
    """
    ddp, config = ddp_config(recipe, overlap_grad_reduce), optimizer_config(recipe)
    if not recipe.optimizer.use_forge:
        chunks = [DistributedDataParallel(model.config, ddp, model) for model in models]
        return chunks, get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    from forge_megatron import megatron as forge

    o = recipe.optimizer
    forge.prepare(models, ddp, config, fused_head=o.fused_head)
    chunks = [DistributedDataParallel(model.config, ddp, model) for model in models]
    return chunks, forge.get_forge_optimizer(
        config,
        chunks,
        options=forge.ForgeOptions(
            # adamw is what the rest of the model has; named, a checkpoint of it would be forge's alone.
            rule=None if o.rule == "adamw" else o.rule,
            recipe=o.recipe,
            update=o.update,
            backend=o.backend,
            seed=recipe.run.seed,
            accumulation_dtype=DTYPES[o.accumulation_dtype],
        ),
        num_microbatches=recipe.micro_batches,
        use_gloo_process_groups=False,
    )


def tune(recipe: Recipe, optimizer: MegatronOptimizer) -> str:
    """Tunes the kernels of the owned weights for one micro-batch's tokens, on all ranks; what is said of it."""
    from forge_megatron import tune

    forges = [each.forge for each in optimizer.chained_optimizers if hasattr(each, "forge")]
    found = tune(forges, [recipe.batch.micro * recipe.data.sequence_length // recipe.parallel.context])
    changed = sum(outcome.chosen != outcome.default for outcome in found.outcomes.values())
    return (
        f"tuned {len(found.outcomes)} kinds of launch ({len(found.measured)} measured now, {changed} changed); "
        f"{len(found.not_tuned)} weights as untuned"
    )


def gradient_bytes(chunks: list) -> int:
    """Bytes that this rank keeps for gradients between steps: Megatron's buffers, and ``.grad`` of its own."""
    kept, buffers = 0, set()
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            buffers.add(buffer.grad_data.untyped_storage().data_ptr())
            kept += buffer.grad_data.untyped_storage().nbytes()
        for parameter in chunk.parameters():
            grad = parameter.grad
            if grad is not None and grad.untyped_storage().data_ptr() not in buffers:
                kept += grad.untyped_storage().nbytes()
    return kept


def build_schedule(recipe: Recipe, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Warm-up and decay, counted in optimizer steps."""
    o = recipe.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=o.lr,
        min_lr=o.min_lr,
        lr_warmup_steps=o.warmup_steps,
        lr_decay_steps=o.decay_steps or recipe.run.steps,
        lr_decay_style=o.decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=recipe.checkpoint.override_schedule,
    )


_SCHEDULE_KEYS = {
    "max_lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_decay_steps": "optimizer.decay_steps",
    "lr_decay_style": "optimizer.decay_style",
    "start_wd": "optimizer.weight_decay",
}


def expect_schedule(scheduler: OptimizerParamScheduler, saved: dict) -> None:
    """Raises ``RecipeError`` where the recipe's schedule is not the ``saved`` one and may not override it."""
    if scheduler.override_opt_param_scheduler:
        return
    ours = scheduler.state_dict()
    for name, key in _SCHEDULE_KEYS.items():
        if ours[name] != saved[name]:
            raise RecipeError(
                key,
                f"{ours[name]} here, {saved[name]} in the checkpoint: give the checkpoint's "
                "value, or checkpoint.override_schedule=true to go on with the recipe's",
            )


def override_ends(scheduler: OptimizerParamScheduler, groups: Iterable[dict]) -> None:
    """Where the recipe's schedule overrides the checkpoint's: its ends, which Megatron reads of each group first."""
    if scheduler.override_opt_param_scheduler:
        for group in groups:
            group.update(max_lr=scheduler.max_lr, min_lr=scheduler.min_lr)
