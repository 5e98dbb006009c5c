"""``torch.distributed.checkpoint`` copies from any dtype to any other, codes of 8-bit states too: this one compares.

>>> from forge_megatron.integrations.checkpoint import LoadPlanner
>>> torch.distributed.checkpoint.load(state, checkpoint_id=folder, planner=LoadPlanner())
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

#: What stands for other numbers, which a scale beside them gives.
_CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class LoadPlanner(DefaultLoadPlanner):
    """torch's, with an error where the codes of a state or weight would be read as its values, or values as codes.

    Numbers of one kind are converted as always, such as bf16 to fp32. Arguments are torch's.
    """

    def create_local_plan(self) -> LoadPlan:
        """As torch's.

        Raises:
            ValueError: a tensor has codes in the checkpoint and none here, or others, or the other way round; by its
                key. Nothing has been read then; ``torch.distributed.checkpoint`` reports it as a CheckpointException.
        """
        plan = super().create_local_plan()
        for key, ours in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if not isinstance(ours, Tensor) or not isinstance(saved, TensorStorageMetadata):
                continue
            theirs = saved.properties.dtype
            if theirs is not ours.dtype and {theirs, ours.dtype} & set(_CODES):
                raise ValueError(
                    f"{key}: {theirs} in the checkpoint, {ours.dtype} here, and torch would copy the codes as "
                    "numbers; attach with the checkpoint's formats, and convert a whole state_dict by "
                    "load_state_dict(..., convert=True)"
                )
        return plan
