"""Arms through megatron.core: Megatron's own DDP and optimizers, and FORGE, on the trainer's model and schedules.

Megatron-core alone, without Transformer Engine and Apex, steps by torch's foreach AdamW. Both sides are given its fused
one here, which keeps no temporaries, as Transformer Engine's does not; and both reduce while backward runs.
"""

from __future__ import annotations

import torch

from launch.bench.arm import Arm
from launch.config import Recipe


def attach(recipe: Recipe, models: list) -> tuple[list, object]:
    """The trainer's optimizer of this recipe."""
    from launch.optim import build_schedule, wrap_and_optimize

    shared = recipe.parallel.data * recipe.parallel.context > 1
    chunks, optimizer = wrap_and_optimize(recipe, models, overlap_grad_reduce=shared)
    # It gives every group its rate and decay, which is none for biases and norms.
    build_schedule(recipe, optimizer).step(1)
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups if one.optimizer is not None else ():
            if "fused" in group:
                group.update(fused=True, foreach=False)
    return chunks, optimizer


class OnMainGradients:
    """``torch.optim.AdamW``, foreach, on the gradients that Megatron has summed; neither its optimizers nor FORGE.

    As Megatron has it, biases and norms do not decay.
    """

    def __init__(self, recipe: Recipe, chunks: list):
        o = recipe.optimizer
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        groups = [
            {"params": [p for p in self.parameters if (p.dim() > 1) == decays], "weight_decay": decay}
            for decays, decay in ((True, o.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, foreach=True)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self) -> None:
        for p in self.parameters:
            p.grad = p.main_grad.to(p.dtype)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def judge(recipe: Recipe, models: list) -> tuple[list, OnMainGradients]:
    """Megatron's DDP, which reduces after backward, and :class:`OnMainGradients`."""
    from megatron.core.distributed import DistributedDataParallel

    from launch.optim import ddp_config

    chunks = [DistributedDataParallel(model.config, ddp_config(recipe), model) for model in models]
    return chunks, OnMainGradients(recipe, chunks)


def _arm(against: str, changes: dict | None = None, forge: bool = True, **how) -> Arm:
    changes = {"optimizer.use_forge": forge, **(changes or {})}
    return Arm(attach, judge="megatron-judge", against=against, over_ranks=True, megatron=changes, **how)


_MASTER = {"optimizer.recipe": "fp32-master"}
#: Megatron's distributed optimizer keeps fp32 masters of bf16 weights whatever is asked.
_ZERO = {**_MASTER, "parallel.distributed_optimizer": True}
_SUMS = {"optimizer.accumulation_dtype": "bf16"}
_INT8, _HEAD = {"optimizer.recipe": "int8"}, {"optimizer.fused_head": True}

ARMS: dict[str, Arm] = {
    "megatron-judge": Arm(
        judge, judge=None, against="megatron", over_ranks=True, megatron={"optimizer.use_forge": False}
    ),
    "megatron": _arm("megatron", forge=False),
    "megatron-forge": _arm("megatron"),
    "megatron-forge-head": _arm("megatron", _HEAD),
    "megatron-forge-bf16-sums": _arm("megatron", _SUMS),
    "megatron-forge-int8": _arm("megatron", _INT8, bound=None),
    "megatron-master": _arm("megatron-master", _MASTER, forge=False),
    "megatron-forge-master": _arm("megatron-master", _MASTER),
    "megatron-zero": _arm("megatron-zero", _ZERO, forge=False),
    "megatron-forge-zero": _arm("megatron-zero", _ZERO),
}
