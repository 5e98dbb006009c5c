"""``--use-forge`` in Megatron-LM's own training loop, ``megatron.training.pretrain``.

megatron-core 0.19, in place of ``pretrain_gpt.py``'s last lines::

    args = parse_and_validate_args(extra_args_provider=add_forge_args)
    model_config = gpt_config_from_args(args)
    forge_pretrain_hooks(args, model_config=model_config)
    pretrain(pretrain_cfg_container_from_args(args, model_config), ...)

megatron-core 0.16, whose ``pretrain`` parses the arguments itself: pass ``add_forge_args`` as its
``extra_args_provider`` and ``forge_model_provider(model_provider)`` in the place of ``model_provider``.

Without ``--use-forge`` neither changes anything.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import nn

from forge_megatron.megatron.arguments import options_from_args


def forge_pretrain_hooks(args: Namespace, *, model_config: Any) -> None:
    """Makes a 0.19 training run use FORGE, if ``args.use_forge``.

    Args:
        args: Megatron's parsed arguments, with those of :func:`add_forge_args`.
        model_config: ``GPTModelConfig``; receives a pre-wrap hook, and with Transformer Engine or context
            parallelism the layer spec.

    Raises:
        NotImplementedError: a Megatron switch that is not built, by name.
    """
    if not args.use_forge:
        return
    from forge_megatron.megatron.build import prepare

    if model_config.transformer_layer_spec is None:
        with_te = args.transformer_impl == "transformer_engine"
        # FSDP2 owns the weights of any linear, and takes Transformer Engine's layers only as Megatron builds them.
        if with_te and not args.use_torch_fsdp2:
            from forge_megatron.megatron.spec import transformer_engine_layer_spec

            model_config.transformer_layer_spec = transformer_engine_layer_spec
        elif not with_te and args.context_parallel_size > 1:
            from forge_megatron.megatron.spec import local_layer_spec

            model_config.transformer_layer_spec = local_layer_spec

    def convert(chunks: list[nn.Module]) -> list[nn.Module]:
        prepare(chunks, args, fused_head=args.forge_fused_head)
        return chunks

    model_config.pre_wrap_hooks = [*model_config.pre_wrap_hooks, convert]
    _step_owned_weights(args)


def forge_model_provider(model_provider: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Wraps a ``model_provider``; reads ``--use-forge`` when Megatron calls it."""

    @functools.wraps(model_provider)
    def provide(*positional: Any, **keywords: Any) -> nn.Module:
        from megatron.training import get_args

        from forge_megatron.megatron.build import prepare

        model = model_provider(*positional, **keywords)
        args = get_args()
        if args.use_forge:
            prepare([model], args, fused_head=args.forge_fused_head)
            _step_owned_weights(args)
        return model

    return provide


def _step_owned_weights(args: Namespace) -> None:
    """Megatron's loop has no hook for the optimizer: the name that it calls is replaced, once."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import training

    from forge_megatron.megatron.build import get_forge_optimizer

    if getattr(training.get_megatron_optimizer, "steps_owned_weights", False):
        return

    def build(config, model_chunks, config_overrides=None, **keywords: Any):
        micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        return get_forge_optimizer(
            config,
            model_chunks,
            config_overrides,
            options=options_from_args(args),
            num_microbatches=micro_batches,
            rerun_mode=get_rerun_state_machine().get_mode(),
            **keywords,
        )

    build.steps_owned_weights = True
    training.get_megatron_optimizer = build
