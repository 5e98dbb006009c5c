"""FORGE in Megatron: tensor-parallel linears that step their weight in backward, and what surrounds them.

>>> from forge_megatron import megatron as forge
>>> forge.prepare([model])                       # the built GPTModel
>>> model = DistributedDataParallel(config, ddp_config, model)
>>> optimizer = forge.get_forge_optimizer(optimizer_config, [model])

Importing this package does not import megatron-core; using a name of it does.
"""

import importlib

_HOME = {
    "ForgeChainedOptimizer": "optimizer",
    "ForgeColumnParallelLinear": "layers",
    "ForgeMegatronOptimizer": "optimizer",
    "ForgeOptions": "build",
    "ForgeRowParallelLinear": "layers",
    "capture_train_step": "capture",
    "convert": "conversion",
    "get_forge_optimizer": "build",
    "prepare": "build",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
