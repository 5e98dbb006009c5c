"""The same function with its sums in another order, to see what rounding alone does to a run.

The hidden channels are permuted in every weight that reads or writes them. In exact arithmetic nothing
changes: not the function, nor the gradients, nor an optimizer that works by coordinate. In floating point
every sum over channels, forward and backward, is taken in another order.
"""

from __future__ import annotations

import torch
from torch import nn

# The axis of the hidden channels, by the end of a parameter's name; None: it has none.
_HIDDEN_AXIS = {
    "word_embeddings.weight": 1,
    "position_embeddings.weight": 1,
    "linear_qkv.weight": 1,
    "linear_qkv.bias": None,
    "linear_proj.weight": 0,
    "linear_proj.bias": 0,
    "linear_fc1.weight": 1,
    "linear_fc1.bias": None,
    "linear_fc2.weight": 0,
    "linear_fc2.bias": 0,
    "input_layernorm.weight": 0,
    "input_layernorm.bias": 0,
    "pre_mlp_layernorm.weight": 0,
    "pre_mlp_layernorm.bias": 0,
    "final_layernorm.weight": 0,
    "final_layernorm.bias": 0,
    "q_layernorm.weight": None,
    "q_layernorm.bias": None,
    "k_layernorm.weight": None,
    "k_layernorm.bias": None,
    "output_layer.weight": 1,
}


@torch.no_grad()
def permute_hidden(model: nn.Module, hidden_size: int, seed: int = 0) -> None:
    """Permute the channels of a model built by ``launch.model`` from the local layer spec, in place.

    Raises:
        ValueError: a parameter whose channels are not known here; nothing has been changed.
    """
    axes = {}
    for name, parameter in model.named_parameters():
        ends = [end for end in _HIDDEN_AXIS if name.endswith(end)]
        if not ends:
            raise ValueError(f"run.reorder: where {name} has its hidden channels is not known")
        axes[parameter] = _HIDDEN_AXIS[ends[0]]
    order = torch.randperm(hidden_size, generator=torch.Generator().manual_seed(seed))
    for parameter, axis in axes.items():
        if axis is not None:
            parameter.copy_(parameter.index_select(axis, order.to(parameter.device)))
