"""A small model under FORGE, and its copy under DistributedDataParallel and torch.optim.AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge

VOCABULARY, WIDTH = 21, 12
#: A bucket of a few rows: every weight is cut.
SMALL = forge.Buckets(nbytes=640, count=2)


class Model(nn.Module):
    """An embedding, blocks of norm and MLP, and a head; tied or not, checkpointed or not.

    Widths are no multiples of anything, so that every weight leaves a remainder in a bucket and on a rank.
    """

    def __init__(self, tied: bool = False, checkpointed: bool | None = None, blocks: int = 2):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        #: use_reentrant, or None.
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.blocks:
            h = h + block(h) if self.checkpointed is None else h + checkpoint(block, h, use_reentrant=self.checkpointed)
        return self.head(h)


def ids(number: int, rank: int | None = None) -> Tensor:
    """Micro-batch ``number`` of a rank; default: of this one."""
    generator = torch.Generator().manual_seed(1000 * number + (dist.get_rank() if rank is None else rank))
    return torch.randint(VOCABULARY, (3, 5), generator=generator)


def loss(model: nn.Module, number: int) -> Tensor:
    return nn.functional.cross_entropy(model(ids(number)).flatten(0, 1).float(), ids(number).roll(1).flatten())


class Twins:
    """One model under FORGE, its copy under DistributedDataParallel and torch.optim.AdamW.

    Args:
        model: copied.
        clip: largest norm.
        each: of each parameter, not of all together.
        micro_batches: of a step.
        multiplier: late scale of the gradient.
        unused: some parameters are not in every graph.
        wrap: FORGE's model is inside DistributedDataParallel too.
        options: of ``attach``.
    """

    def __init__(
        self, model: nn.Module, *, clip=None, each: bool = False, micro_batches: int = 1, multiplier=None,
        wrap: bool = False, unused: bool = False, lr: float = 1e-2, **options,
    ):  # fmt: skip
        self.model, self.reference = copy.deepcopy(model), copy.deepcopy(model)
        self.clip, self.each, self.micro_batches, self.multiplier = clip, each, micro_batches, multiplier
        if each:
            options["clip"] = "weight"
        if multiplier is not None:
            options["waiting"] = True
        self.optimizer = forge.attach(
            self.model, lr=lr, clip_grad_norm=clip, accumulation_steps=micro_batches,
            process_group=dist.group.WORLD, **options,
        )  # fmt: skip
        self.called = DistributedDataParallel(self.model) if wrap else self.model
        self.ddp = DistributedDataParallel(self.reference, find_unused_parameters=unused)
        self.oracle = torch.optim.AdamW(self.reference.parameters(), lr=lr)
        self.number = 0
        self.norm: Tensor | None = None
        #: What FORGE's micro-batches but the last are run in.
        self.deferred: Callable[[], AbstractContextManager] = nullcontext

    def step(self, loss: Callable[[nn.Module, int], Tensor] = loss) -> None:
        for index in range(self.micro_batches):
            with self.deferred() if index + 1 < self.micro_batches else nullcontext():
                loss(self.called, self.number).backward()
            if index + 1 < self.micro_batches:
                with self.ddp.no_sync():
                    loss(self.ddp, self.number).backward()
            else:
                loss(self.ddp, self.number).backward()
            self.number += 1
        if self.multiplier is not None:
            for p in self.reference.parameters():
                p.grad.mul_(self.multiplier)
        limit = float("inf") if self.clip is None or self.each else self.clip
        self.norm = nn.utils.clip_grad_norm_(self.reference.parameters(), limit)
        for p in self.reference.parameters() if self.each else ():
            nn.utils.clip_grad_norm_([p], self.clip)
        self.optimizer.step(**({} if self.multiplier is None else {"gradient_multiplier": self.multiplier}))
        self.optimizer.zero_grad()
        self.oracle.step()
        self.oracle.zero_grad()

    def train(self, steps: int = 4, loss: Callable[[nn.Module, int], Tensor] = loss) -> Twins:
        for _ in range(steps):
            self.step(loss)
            torch.testing.assert_close(self.optimizer.grad_norm, self.norm, rtol=2e-6, atol=0)
        return self

    def expect_equal(self, atol: float = 1e-6) -> None:
        """Weights and this rank's states agree with the oracle's; replicas have equal bits."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            close(name, ours, theirs, atol)
            state, expected = self.optimizer.state[ours], self.oracle.state.get(theirs)
            if expected is None:
                assert state["step"] == 0, name
                continue
            assert state["step"] == expected["step"], name
            for key in ("exp_avg", "exp_avg_sq"):
                close(f"{name} {key}", state[key], self.optimizer.held(expected[key]), atol)
        expect_equal_replicas(self.model)


def close(what: str, ours: Tensor, theirs: Tensor, atol: float) -> None:
    assert ours.shape == theirs.shape, what
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda m: f"{what}: {m}")


def expect_equal_replicas(model: nn.Module) -> None:
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    assert all(torch.equal(flat, other) for other in copies)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]
