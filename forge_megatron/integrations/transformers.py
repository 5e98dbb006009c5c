"""Hugging Face Trainer: one line between construction and training, ``attach(trainer)``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import DistributedType
from transformers import Trainer

from forge_megatron.attach import attach as attach_model
from forge_megatron.integrations.accelerate import connect
from forge_megatron.optimizer import ForgeOptimizer

_DATA_PARALLEL = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def attach(trainer: Trainer, **options) -> ForgeOptimizer:
    """Gives ``trainer`` a :class:`ForgeOptimizer` in the place of the AdamW that it would make.

    Learning rate, betas, epsilon, weight decay (which spares biases and norms), clipping, accumulation, scheduler,
    fp16 or bf16, gradient checkpointing and resuming follow the ``TrainingArguments``. Weights are updated inside
    backward where nothing asks them to wait: ``max_grad_norm=0``, ``gradient_accumulation_steps=1`` and no fp16.

    Ranks that torchrun has started are data-parallel ones: their gradients are summed in buckets.

    Args:
        trainer: not yet trained, without an optimizer of its own.
        options: of :func:`forge_megatron.attach` beyond those that the arguments give (``recipe``, ``skip`` ...).

    Returns:
        The optimizer, which is ``trainer.optimizer`` from now on.

    Raises:
        RuntimeError: the trainer has an optimizer already.
        NotImplementedError: another optimizer than AdamW is asked for; several devices in one process; sharded states,
            FSDP, DeepSpeed; a trainer that would drop this optimizer, or has param groups of its own.
    """
    args = trainer.args
    if trainer.optimizer is not None:
        raise RuntimeError("the trainer has an optimizer already; attach before train(), without optimizers=")
    if args.n_gpu > 1:
        raise NotImplementedError(
            f"a Trainer of one process on {args.n_gpu} devices copies the model to each at every step; start a process "
            "for each (torchrun), or train on one (CUDA_VISIBLE_DEVICES=0)"
        )
    ranks = trainer.accelerator.num_processes > 1
    if ranks and (kind := trainer.accelerator.distributed_type) not in _DATA_PARALLEL:
        raise NotImplementedError(f"a Trainer under {kind}; use DistributedDataParallel, which torchrun alone starts")
    if ranks and options.get("sharding", "none") != "none":
        raise NotImplementedError(
            f"sharding={options['sharding']!r} with a Trainer, which saves the first rank's optimizer alone; omit it"
        )
    if args.auto_find_batch_size:
        raise NotImplementedError(
            "auto_find_batch_size=True: after an out-of-memory error train() begins again without discarding the "
            "broken window, of which weights may have been stepped; give per_device_train_batch_size"
        )
    if trainer.model_init is not None:
        raise NotImplementedError(
            "a Trainer with model_init= makes a new model and another optimizer when train() begins; give it model="
        )
    for name in ("create_optimizer", "create_optimizer_and_scheduler"):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            raise NotImplementedError(
                f"{type(trainer).__name__} has a {name}() of its own, whose param groups would not be used; give them "
                "to forge_megatron.attach(model, params=...), connect(trainer.accelerator), and set trainer.optimizer"
            )
    cls, hyperparameters = trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
    if cls is not torch.optim.AdamW or trainer.optimizer_cls_and_kwargs is not None:
        raise NotImplementedError(f"optim={args.optim!r}: FORGE's rule here is AdamW; use optim='adamw_torch'")
    for implementation in ("fused", "foreach"):
        hyperparameters.pop(implementation, None)
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    waits = args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1 or args.fp16
    trainer.optimizer = attach_model(
        trainer.model,
        "adamw",
        groups,
        **{
            **hyperparameters,
            "waiting": waits,
            # The Trainer counts: its last window is shorter.
            "accumulation_steps": None if args.gradient_accumulation_steps > 1 else 1,
            "process_group": dist.group.WORLD if ranks else None,
            **options,
        },
    )
    connect(trainer.accelerator)
    return trainer.optimizer
