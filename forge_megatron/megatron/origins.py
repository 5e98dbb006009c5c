"""Where this rank's part of each weight lies in the whole weight, as Megatron's sharded checkpoint says it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import Tensor, nn

from forge_megatron.formats import Origin
from forge_megatron.megatron.conversion import global_names, unwrap


def origins(model_chunks: Sequence[nn.Module], weights: Sequence[Tensor]) -> dict[Tensor, Origin]:
    """The name with the layer's number in the whole model, and the place, of each of ``weights``.

    Args:
        weights: ``[O, I]``; experts in one tensor are ``[experts, O, I]``, and the whole one all experts, one below
            the other.

    Raises:
        NotImplementedError: experts in one tensor of which tensor-parallel ranks have shards.
    """
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found: dict[Tensor, Origin] = {}
    for chunk in model_chunks:
        model = unwrap(chunk)
        known = global_names(model)
        names = {p: known[name] for name, p in model.named_parameters()}
        members = [weight for weight in weights if weight in names]
        shards = get_param_id_to_sharded_param_map(model.sharded_state_dict(metadata=metadata), members)
        found.update(
            (p, (_origin if p.dim() == 2 else _origin_of_experts)(names[p], shards[index]))
            for index, p in enumerate(members)
        )
    return found


def _origin(name: str, sharded: ShardedTensor | ShardedTensorFactory) -> Origin:
    """A factory is SwiGLU's first linear: a rank's gate rows and up rows are apart in the whole."""
    parts = sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]
    row, column = _corner(parts[0])
    if len(parts) == 1:
        return Origin(name, row, column)
    first, second = parts
    split = first.data.shape[0]
    return Origin(name, row, column, split, _corner(second)[0] - row - split)


def _origin_of_experts(name: str, sharded: ShardedTensorFactory) -> Origin:
    # Some ranks' experts are not named by a range of them: the bits do not depend on how many a rank has.
    of_all = re.sub(r"\.\d+-\d+\.", ".", name)
    pieces = sharded.build()
    first, rows = pieces[0], sharded.data.shape[1]
    whole = first.global_shape[first.prepend_axis_num :]
    if whole != tuple(sharded.data.shape[1:]):
        raise NotImplementedError(
            f"{name}: stochastic rounding of shards of experts in one tensor is not built; set "
            "expert_tensor_parallel_size=1, or use recipe='fp32-master'"
        )
    return Origin(of_all, row=first.global_offset[first.prepend_axis_num - 1] * rows)


def _corner(shard: ShardedTensor) -> tuple[int, int]:
    row, column = shard.global_offset[shard.prepend_axis_num :]
    return row, column
