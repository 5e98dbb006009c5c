"""Arms over data-parallel ranks: replicated, states sharded, fully sharded. AdamW, and the mean over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import forge_megatron as forge
from launch.bench.arm import Arm, Settings


def _ddp(make: Callable) -> Callable:
    def attach(model: nn.Module, settings: Settings):
        device = next(model.parameters()).device
        how = {} if settings.bucket_bytes is None else {"bucket_cap_mb": settings.bucket_bytes / 2**20}
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **how)
        return wrapped, make(wrapped.parameters(), settings)

    return attach


def _fused(params, settings: Settings):
    return torch.optim.AdamW(params, **settings.adamw, fused=True)


def _bitsandbytes(params, settings: Settings):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, **settings.adamw)


def _zero(params, settings: Settings):
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **settings.adamw, fused=True)


def _forge(**how) -> Callable:
    def attach(model: nn.Module, settings: Settings):
        buckets = {} if settings.bucket_bytes is None else {"buckets": forge.Buckets(nbytes=settings.bucket_bytes)}
        group = dist.group.WORLD
        return forge.attach(model, "adamw", process_group=group, **buckets, **settings.adamw, **how)

    return attach


def _shard(model: nn.Module, **how) -> nn.Module:
    """A unit a decoder layer, and one of the rest, as torchtitan and Hugging Face shard such a model."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def _fsdp2(policy: MixedPrecisionPolicy | None = None) -> Callable:
    def attach(model: nn.Module, settings: Settings):
        model = _shard(model, **({} if policy is None else {"mp_policy": policy}))
        return model, _fused(model.parameters(), settings)

    return attach


def _forge_sharded(**how) -> Callable:
    return lambda model, settings: forge.attach(_shard(model), "adamw", **settings.adamw, **how)


_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _over_ranks(attach: Callable, against: str, **how) -> Arm:
    return Arm(attach, against=against, over_ranks=True, **how)


_INT8, _SR, _MASTER = {"recipe": "int8"}, {"recipe": "sr-store"}, {"recipe": "fp32-master"}

#: Against the arm of the same recipe and sharding class; ``zero-redundancy`` is torch's ZeRO-1, in bf16
#: states, which DeepSpeed's ZeRO has with an fp32 master.
ARMS: dict[str, Arm] = {
    "ddp-fused": _over_ranks(_ddp(_fused), "ddp-fused", bucketed=True),
    "ddp-bitsandbytes": _over_ranks(_ddp(_bitsandbytes), "ddp-bitsandbytes", bound=None, package="bitsandbytes"),
    "forge-dp": _over_ranks(_forge(), "ddp-fused", bucketed=True),
    "forge-dp-captured": _over_ranks(_forge(), "ddp-fused", bucketed=True, captured=True),
    "forge-dp-int8": _over_ranks(_forge(**_INT8), "ddp-bitsandbytes", bound=None),
    "forge-dp-int8-captured": _over_ranks(_forge(**_INT8), "ddp-bitsandbytes", bound=None, captured=True),
    "forge-dp-sr": _over_ranks(_forge(**_SR), "ddp-fused", bound=None),
    "forge-dp-master": _over_ranks(_forge(**_MASTER), "ddp-fused"),
    "zero-redundancy": _over_ranks(_ddp(_zero), "zero-redundancy"),
    "forge-states": _over_ranks(_forge(sharding="states"), "zero-redundancy"),
    "forge-states-captured": _over_ranks(_forge(sharding="states"), "zero-redundancy", captured=True),
    "forge-states-master-captured": _over_ranks(_forge(sharding="states", **_MASTER), "deepspeed-zero2", captured=True),
    "forge-states-master": _over_ranks(_forge(sharding="states", **_MASTER), "deepspeed-zero2"),
    "fsdp2-fused": _over_ranks(_fsdp2(), "fsdp2-fused"),
    "forge-fsdp": _over_ranks(_forge_sharded(), "fsdp2-fused"),
    "forge-fsdp-int8": _over_ranks(_forge_sharded(**_INT8), "fsdp2-fused", bound=None),
    "fsdp2-master": _over_ranks(_fsdp2(_MIXED), "fsdp2-master", bound=None, dtype="fp32"),
    "forge-fsdp-master": _over_ranks(_forge_sharded(**_MASTER), "fsdp2-master"),
}
