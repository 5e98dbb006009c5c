"""FORGE: the optimizer step on each weight-gradient tile, in the registers that produced it.

>>> import forge_megatron as forge
>>> optimizer = forge.attach(model, "adamw", lr=1e-3)
>>> loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from forge_megatron import vocab
from forge_megatron.attach import attach, decay_groups
from forge_megatron.coordinator import Buckets
from forge_megatron.linear import GroupedLinear
from forge_megatron.optimizer import ForgeOptimizer
from forge_megatron.tuning import Tuned, tune

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "ForgeOptimizer",
    "GroupedLinear",
    "Tuned",
    "__version__",
    "attach",
    "decay_groups",
    "tune",
    "vocab",
]
