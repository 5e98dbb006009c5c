"""Initial weights of experts that do not depend on which rank has them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def experts_apart() -> Iterator[None]:
    """Inside, other weights do not depend on how many experts are made on this rank."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    initialize = SequentialMLP.__init__

    def apart(self, *args, **keywords):
        with torch.random.fork_rng(devices=[]):
            initialize(self, *args, **keywords)

    with patch.object(SequentialMLP, "__init__", apart):
        yield


@torch.no_grad()
def initialize_experts(model) -> None:
    """Each expert by its number in the whole model."""
    from megatron.core import parallel_state

    from forge_megatron.megatron.conversion import global_names

    known, shards = global_names(model), parallel_state.get_expert_tensor_parallel_world_size()
    for name, parameter in model.named_parameters():
        if ".local_experts." in name and parameter.dim() == 2:
            generator = torch.Generator().manual_seed(zlib.crc32(known[name].encode()))
            shape = list(parameter.shape)
            shape[parameter.partition_dim] *= shards
            whole = torch.randn(shape, generator=generator) * 0.1
            shard = whole.chunk(shards, parameter.partition_dim)[parallel_state.get_expert_tensor_parallel_rank()]
            parameter.copy_(shard)
