"""State tensors that somebody put in the place of ours: offloading, a reset, an average."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from forge_megatron.kernels import is_sharded


def replacements(label: str, made: Mapping[str, Tensor], found: Mapping, numbers: Collection[str]) -> dict[str, Tensor]:
    """What somebody put in the place of a parameter's states, checked.

    Args:
        label: what errors call the parameter.
        made: its states, by name.
        found: what ``optimizer.state`` has.
        numbers: the names of those that are 0-dim, of which any dtype and a plain number will do.

    Raises:
        RuntimeError: a state is missing, or has another shape or dtype.
    """
    values = {}
    for name, tensor in made.items():
        value = found.get(name)
        if name in numbers and isinstance(value, (int, float)):
            value = torch.tensor(float(value))
        if (
            not isinstance(value, Tensor)
            or value.shape != tensor.shape
            or (value.dtype != tensor.dtype and name not in numbers)
            or is_sharded(value) != is_sharded(tensor)
        ):
            what = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)
            raise RuntimeError(
                f"{label}: optimizer.state has {what} in the place of {name}, {list(tensor.shape)} {tensor.dtype}; put "
                "a tensor like it there, or load_state_dict()"
            )
        values[name] = value
    return values
