"""``fp8-weight`` under Megatron: which weights lie in memory as e4m3 codes, and what a checkpoint has of them.

A checkpoint has their values, on the host and in the weight's dtype, which holds every code exactly: any run reads
them, on any tensor-parallel size, and a run that stores codes gets the same values back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor, nn

from forge_megatron.codes import become
from forge_megatron.formats import RECIPES, Fp8Weight
from forge_megatron.kernels import is_sharded


def stores_codes(recipe: str | None) -> bool:
    return recipe in RECIPES and RECIPES[recipe][1] == "fp8"


def store_as_codes(model_chunks: Iterable[nn.Module], owned: Sequence[Tensor], linears: tuple[type, ...]) -> bool:
    """Rounds to the nearest codes those of ``owned`` that a linear alone reads; whether there are any.

    Args:
        model_chunks: of this rank.
        owned: the weights that FORGE steps.
        linears: the classes of these linears; a head that leaves its product to the loss is none.
    """
    modules = [module for chunk in model_chunks for module in chunk.modules()]
    weights = [module._parameters.get("weight") for module in modules]
    readers = Counter(map(id, weights))
    chosen = set(map(id, owned))
    stored = [
        weight
        for module, weight in zip(modules, weights, strict=True)
        if type(module) in linears and id(weight) in chosen and readers[id(weight)] == 1
    ]
    for weight in stored:
        become(weight, Fp8Weight.of(weight))
    return bool(stored)


def values_of(weight: Tensor) -> Tensor:
    """A weight's values, outside the graph; of one that is stored as codes on the host, a copy."""
    return weight.dequantize().cpu() if isinstance(weight, Fp8Weight) else weight.detach()


def with_values(sharded: dict[str, Any]) -> dict[str, Any]:
    """A module's sharded state dict, with values in the place of codes."""
    for entry in sharded.values():
        weight = entry.data if isinstance(entry, ShardedTensor) else None
        if isinstance(weight, Fp8Weight):
            entry.data = values_of(weight)
            entry.data.forge_weight = weight
    return sharded


def shards_of(
    model_state: Mapping[str, Any], weights: Sequence[Tensor]
) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """Megatron's entry of each of ``weights``, by its position, also where :func:`with_values` has put values there."""
    entries = (value for value in nested_values(model_state) if isinstance(value, ShardedTensor | ShardedTensorFactory))
    values = {id(e.data.forge_weight): e.data for e in entries if hasattr(e.data, "forge_weight")}
    # Megatron's entry has a DTensor's own local tensor, of which torch 2.13's to_local() makes another parameter.
    held = [weight._local_tensor if is_sharded(weight) else values.get(id(weight), weight) for weight in weights]
    return get_param_id_to_sharded_param_map(model_state, held)
