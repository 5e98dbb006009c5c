"""Save, read back, compare: a checkpoint that cannot be written or read fails a run at its start.

It is done after the first step, because an optimizer may have no state before.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from launch import checkpoint, manifest

_WITH_DATA = (ShardedTensor, ShardedTensorFactory)


def _blank(leaf: object) -> object:
    """The leaf with memory of its own on the CPU: loading fills a tensor in place, and the live
    state must not be what is filled."""
    if not isinstance(leaf, _WITH_DATA):
        return leaf
    data = torch.empty_like(leaf.data, device="cpu")
    return dataclasses.replace(leaf, data=data.fill_(torch.nan) if data.is_floating_point() else data)


def _value(leaf: object) -> object:
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf.unwrap()
    return leaf.data if isinstance(leaf, (*_WITH_DATA, ShardedObject)) else leaf


def differences(saved: object, loaded: object, path: str = "state") -> list[str]:
    """Keys at which ``loaded`` is not bit-equal to ``saved``."""
    if isinstance(saved, dict):
        if not isinstance(loaded, dict) or saved.keys() - loaded.keys():
            return [f"{path}: keys are missing"]
        return [d for key in saved for d in differences(saved[key], loaded[key], f"{path}.{key}")]
    if isinstance(saved, list | tuple):
        if not isinstance(loaded, list | tuple) or len(saved) != len(loaded):
            return [f"{path}: another length"]
        return [d for i, pair in enumerate(zip(saved, loaded, strict=True)) for d in differences(*pair, f"{path}.{i}")]
    if isinstance(saved, torch.Tensor):
        same = isinstance(loaded, torch.Tensor) and saved.dtype == loaded.dtype
        return [] if same and torch.equal(saved.detach().cpu(), loaded.detach().cpu()) else [path]
    if hasattr(saved, "getvalue"):  # Transformer Engine's extra state, an io.BytesIO
        return [] if saved.getvalue() == loaded.getvalue() else [path]
    return [] if saved == loaded else [path]


def run(folder: Path, step: int, state: dict) -> None:
    """Write ``state`` to a folder of its own beneath ``folder``, read it back, remove it. Collective.

    Raises:
        CheckpointError: what was read is not, bit for bit, what was written.
    """
    scratch = folder / ".self-test"
    # Before the save, which reshapes the state dict's tensors in place.
    expected, blank = (dict_list_map_outplace(leaf, state) for leaf in (_value, _blank))
    written = checkpoint.save(scratch, step, state, keep=1)
    fault = manifest.fault(written)
    wrong: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    if fault is None:
        dist.all_gather_object(wrong, differences(expected, checkpoint.load(written, blank)))
    keys = sorted({key for of_a_rank in wrong for key in of_a_rank})
    if fault or keys:
        raise checkpoint.CheckpointError(
            f"checkpoint self-test in {scratch}: {fault or 'not read back as written: ' + ', '.join(keys[:8])}"
        )
    checkpoint.on_rank_zero(lambda: shutil.rmtree(scratch))
