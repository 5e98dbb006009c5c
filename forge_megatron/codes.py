"""Weights of linear layers as e4m3 codes: which are stored so, and the way there and back.

A parameter stays the object that it was, in the model, in param groups and in the optimizer, whatever lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from forge_megatron.formats import FORMAT_KEYS, WEIGHT_DTYPES, Fp8Weight, resolve_group
from forge_megatron.kernels import is_sharded
from forge_megatron.linear import owner_of
from forge_megatron.linear.ownership import reason_not_fused

# What an Fp8Weight is made of.
_STORED = {"codes", "scales", "_is_param"}


class Governed(Protocol):
    """What is asked of the optimizer."""

    names: Mapping[Tensor, str]
    param_groups: list[dict]


def store_as_codes(model: nn.Module, optimizer: Governed, options: Mapping) -> bool:
    """Rounds to the nearest codes the weights that only linear layers read, in groups of ``weight_store="fp8"``.

    Args:
        model: as :func:`forge_megatron.attach` takes it.
        optimizer: of its parameters; it has stepped nothing yet.
        options: those of :func:`forge_megatron.attach`.

    Returns:
        Whether there are any.

    Raises:
        NotImplementedError: weights that ``fully_shard`` has sharded; nothing has changed.
    """
    formats = {key: options.get(key) for key in FORMAT_KEYS}
    readers: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            readers.setdefault(p, []).append(module)
    stored = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            # A frozen weight of another library may have any dtype: a quantised base under adapters.
            if p.dtype not in WEIGHT_DTYPES or resolve_group(p.dtype, group, formats)[1].name != "fp8":
                continue
            if is_sharded(p):
                raise NotImplementedError(
                    f"{optimizer.names[p]}: weight_store='fp8' of weights that fully_shard has sharded is not built; "
                    "use 'stochastic' or 'master', or attach(process_group=..., sharding='states')"
                )
            if _only_multiplied(p, readers.get(p, [])):
                stored.append(p)
    for p in stored:
        if not isinstance(p, Fp8Weight):
            become(p, Fp8Weight.of(p))
    return bool(stored)


def _only_multiplied(p: Tensor, readers: list[nn.Module]) -> bool:
    """Nobody reads ``p`` but linear layers, as their weight; another optimizer that owns it will object to this one."""
    linears = all(m._parameters.get("weight") is p and reason_not_fused(m) is None for m in readers)
    return bool(readers) and linears and owner_of(p) is None


def store_dense(params: Iterable[Tensor]) -> bool:
    """Gives those of ``params`` that are stored as codes their values in their dtype; whether there are any."""
    stored = [p for p in params if isinstance(p, Fp8Weight)]
    for p in stored:
        become(p, p.dequantize())
    return bool(stored)


def become(p: Tensor, tensor: Tensor) -> None:
    """Puts ``tensor`` in the place of the parameter ``p``, which keeps its gradient and what was written on it."""
    other = nn.Parameter(tensor, requires_grad=p.requires_grad)
    other.grad = p.grad
    other.__dict__.update((name, value) for name, value in vars(p).items() if name not in _STORED)
    torch.utils.swap_tensors(p, other)
