"""``--use-forge`` and ``--forge-*`` for Megatron's argument parser, through its ``extra_args_provider``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import torch

from forge_megatron.formats import RECIPES
from forge_megatron.kernels.backend import BACKENDS
from forge_megatron.rules import available

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_forge_args(parser: ArgumentParser) -> ArgumentParser:
    """``extra_args_provider`` of ``megatron.training``; compose it with one of your own by calling both."""
    group = parser.add_argument_group("forge", "the optimizer step inside backward")
    group.add_argument("--use-forge", action="store_true", help="step the weights of linears inside their backward")
    group.add_argument(
        "--forge-rule",
        choices=available(),
        default=None,
        help="the rule of these weights (default: what --optimizer means, adam being AdamW); what FORGE does not own "
        "stays with --optimizer",
    )
    group.add_argument(
        "--forge-rule-options",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="hyperparameters of the rule, over those that Megatron's own options give, such as 'betas=(0.9,0.99)'",
    )
    group.add_argument(
        "--forge-recipe",
        choices=sorted(name for name, (_, store) in RECIPES.items() if store != "fp8"),
        default=None,
        help="state format and weight store of these weights (default: the parameter's dtype, nearest)",
    )
    group.add_argument(
        "--forge-update",
        choices=("auto", "backward", "step"),
        default="auto",
        help="when: in backward, at step() from kept factors, or (auto) in backward unless a switch such as "
        "--clip-grad needs the whole gradient first",
    )
    group.add_argument(
        "--forge-backend",
        choices=BACKENDS,
        default="auto",
        help="the kernels; auto chooses them by GPU and shape",
    )
    group.add_argument(
        "--forge-fused-head",
        action="store_true",
        help="output layer and loss in one, by blocks of the vocabulary: the logits never exist whole",
    )
    group.add_argument(
        "--forge-accumulation-dtype",
        choices=sorted(_DTYPES),
        default="fp32",
        help="of a 16-bit weight's sum of micro-batches, where that takes less than their factors; bf16 takes half "
        "of the memory and is rounded with every micro-batch",
    )
    group.add_argument("--forge-seed", type=int, default=0, help="of stochastic rounding (sr-store)")
    return parser


def options_from_args(args: Namespace):
    """:class:`forge_megatron.megatron.ForgeOptions` of the parsed arguments."""
    from forge_megatron.megatron.build import ForgeOptions
    from forge_megatron.megatron.rule import parsed

    return ForgeOptions(
        rule=args.forge_rule,
        hyperparameters=parsed(args.forge_rule_options),
        recipe=args.forge_recipe,
        update=args.forge_update,
        backend=args.forge_backend,
        seed=args.forge_seed,
        accumulation_dtype=_DTYPES[args.forge_accumulation_dtype],
    )
