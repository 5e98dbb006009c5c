"""How a weight lies in memory between two steps, and what a step rounds it to."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightStore:
    """A weight store.

    Attributes:
        name: its name in recipes and in ``weight_store=``.
        master: whether an fp32 copy is stepped and the weight is that copy, rounded to nearest
            even. Without it the weight itself is stepped, in fp32, and rounded back.
        stochastic: whether a bf16 weight, or one of e4m3 codes, is rounded back to one of its two neighbours at
            random, so that on average nothing is lost (:mod:`forge_megatron.formats.noise`); not to nearest.
    """

    name: str
    master: bool = False
    stochastic: bool = False

    def allocate(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the master copy of ``weight``, or None where the weight is its own master."""
        if not self.master or weight.dtype is torch.float32:
            return None
        return weight.detach().to(torch.float32)


#: ``fp8`` is of the weights of linear layers; others have no part in a GEMM, and are stored as ``stochastic`` says.
_STORES = {
    "nearest": WeightStore("nearest"),
    "stochastic": WeightStore("stochastic", stochastic=True),
    "master": WeightStore("master", master=True),
    "fp8": WeightStore("fp8", stochastic=True),
}


def weight_store(name: str) -> WeightStore:
    """Return the weight store called ``name``. Raises ``ValueError`` if there is none."""
    if name not in _STORES:
        raise ValueError(f"weight_store={name!r} is unknown; use one of: {', '.join(_STORES)}")
    return _STORES[name]
