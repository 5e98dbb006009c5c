"""A small model whose gradients are partial over the ranks, with FORGE: what T1 and T2 judge.

The model, its data and the reference in one process are those of the fully sharded gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import forge_megatron as forge
from gates.gate import Case
from gates.pair import ADAMW, STATES, Run
from gates.sharded import Arm, Model, steps


@dataclass(frozen=True)
class How:
    """One way to train: where states are, micro-batches, and the bytes of a bucket."""

    sharding: str
    arm: Arm
    nbytes: int


# Buckets that cut every weight, and one that holds them all.
HOWS = {
    "replicated, on arrival": How("none", Arm(), 1000),
    "replicated, waiting": How("none", Arm(micro_batches=2, clip=0.5), 1000),
    "sharded states, on arrival": How("states", Arm(), 1000),
    "sharded states, waiting": How("states", Arm(micro_batches=2, clip=0.5), 1 << 20),
}


def attached(case: Case, how: How) -> tuple[nn.Module, forge.ForgeOptimizer]:
    model = Model(case)
    waits = {"accumulation_steps": how.arm.micro_batches, "clip_grad_norm": how.arm.clip}
    ranks = {"process_group": dist.group.WORLD, "sharding": how.sharding, "buckets": forge.Buckets(nbytes=how.nbytes)}
    return model, forge.attach(model, "adamw", **waits, **ranks, **ADAMW)


def parallel(case: Case, how: How) -> Run:
    """FORGE over the ranks; whole tensors of every parameter."""
    model, optimizer = attached(case, how)
    losses = list(steps(case, how.arm, model, optimizer))
    named = dict(model.named_parameters())
    whole = list(optimizer.state_dict(full=True)["state"].values())
    states = {name: tuple(state[s] for s in STATES) for name, state in zip(named, whole, strict=True)}
    return Run({name: p.detach() for name, p in named.items()}, states, losses)


def drift(tensors: list[torch.Tensor]) -> float:
    """Largest difference of these tensors between the ranks; NaN stays."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    return (torch.stack(copies) - flat).abs().max().item()
