"""Which rule steps the owned weights, with which hyperparameters: Megatron's ``--optimizer``, or ``--forge-rule``."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from forge_megatron import rules
from forge_megatron.rules import Rule


def megatrons(config: OptimizerConfig) -> Rule:
    """The rule that is Megatron's ``--optimizer``: ``adam`` is AdamW unless its decay is not decoupled."""
    if config.optimizer == "adam":
        return rules.get("adamw" if config.decoupled_weight_decay else "adam")
    return rules.get(config.optimizer)


def hyperparameters(config: OptimizerConfig, rule: Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rule's, from Megatron's options of the same meaning, then from ``--forge-rule-options``.

    ``--adam-beta1``, ``--adam-beta2`` and ``--adam-eps`` are those of all rules that have both betas and eps.
    """
    known = rule.defaults.keys()
    found: dict[str, Any] = {"lr": config.lr}
    if "weight_decay" in known:
        found["weight_decay"] = config.weight_decay
    if {"betas", "eps"} <= known:
        found.update(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    if rule.name == "lion" and config.optimizer == "lion":
        found["betas"] = (config.lion_beta1, config.lion_beta2)
    if rule.name in ("sgd", "momentum"):
        found["momentum"] = config.sgd_momentum
    return {**found, **given}


def dense_states(config: OptimizerConfig) -> tuple[str, ...]:
    """The names of the states that Megatron's own optimizer keeps of each parameter."""
    rule = megatrons(config)
    return rule.variant(rule.resolve(hyperparameters(config, rule, {}))).states


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """``["nesterov=True", "betas=(0.9,0.99)"]`` as hyperparameters.

    Raises:
        ValueError: one that is not ``name=value`` with a Python literal as its value.
    """
    found = {}
    for option in options:
        name, equals, text = option.partition("=")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            equals = ""
        if not equals:
            raise ValueError(
                f"--forge-rule-options {option!r}: give name=value, the value a number, True, False or (0.9,0.99)"
            )
    return found
