"""Rules that read a whole matrix under Megatron: which weights they step, and what a fused weight holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from forge_megatron import rules
from forge_megatron.megatron.rule import hyperparameters
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole

#: Rules of hidden matrices: the output layer is left to AdamW.
_HIDDEN_ONLY = frozenset({"muon", "galore", "apollo", "apollo_mini"})


def expect_matrices(rule: Rule, owned: Sequence[Tensor]) -> None:
    """Raises where a rule that reads a whole weight would read all the experts that a rank has as one.

    Raises:
        NotImplementedError: names the rule.
    """
    if rule.regime != "fused" and any(weight.dim() == 3 for weight in owned):
        raise NotImplementedError(
            f"--forge-rule {rule.name} reads whole matrices, and experts in one tensor are as many as a rank has; turn "
            "moe_grouped_gemm off, with which an expert is a weight of its own"
        )


def groups_of(
    rule: Rule,
    chosen: Mapping[str, Any],
    config: OptimizerConfig,
    model: TransformerConfig,
    group: Mapping[str, Any],
    members: Sequence[tuple[str, Tensor]],
    places: Mapping[Tensor, Whole] | None = None,
) -> list[dict[str, Any]]:
    """``group`` with ``members``, cut by what the rule does with each.

    Args:
        rule: of the owned weights.
        chosen: its hyperparameters from ``--forge-rule-options``.
        config: of Megatron's optimizer, for the output layer's AdamW.
        model: what a fused weight holds.
        group: Megatron's.
        members: its owned weights, named.
        places: the weights of which they are shards, if they are.
    """
    cut: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, weight in members:
        head = rule.name in _HIDDEN_ONLY and getattr(weight, "is_embedding_or_output_parameter", False)
        shape = (places or {}).get(weight, WHOLE).shape(weight)
        split = None if head or rule.name != "muon" or "row_split" in chosen else row_split(name, shape, model)
        cut.setdefault("head" if head else split, []).append((name, weight))
    groups = []
    for key, part in cut.items():
        further: dict[str, Any] = {}
        if key == "head":
            adamw = rules.get("adamw")
            further = {**hyperparameters(config, adamw, {}), "rule": adamw.name}
        elif key is not None:
            further = {"row_split": key}
        groups.append({**group, **further, "params": part})
    return groups


def row_split(name: str, shape: torch.Size, model: TransformerConfig) -> tuple[int, ...] | None:
    """The matrices in a fused weight, as Muon's ``row_split``: queries, keys and values, and SwiGLU's two halves.

    Args:
        shape: of the whole weight, whatever its sharding.

    Raises:
        ValueError: the rows are not those of the attention that the config describes.
    """
    rows = shape[0]
    if name.endswith("linear_fc1.weight") and model.gated_linear_unit:
        return (rows // 2, rows // 2)
    if not name.endswith("linear_qkv.weight"):
        return None
    queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
    gate = (queries,) if getattr(model, "attention_output_gate", False) else ()
    blocks = (queries, *gate, model.kv_channels, model.kv_channels)
    if sum(blocks) * model.num_query_groups != rows:
        raise ValueError(
            f"{name}: {rows} rows are not {model.num_query_groups} groups of {blocks}; give the blocks of this layout "
            "with --forge-rule-options row_split=(...)"
        )
    return blocks
