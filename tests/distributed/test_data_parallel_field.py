"""Data-parallel ranks as their users run them: four ranks against one process that has every rank's batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import forge_megatron as forge
from tests.distributed.ranks import Workers
from tests.distributed.twins import SMALL, Model, expect_equal_replicas, ids, loss, weights

workers = Workers()
#: eps is far above a rounding of a gradient near zero, which Adam would otherwise blow up to a whole lr.
ADAMW = {"lr": 1e-2, "eps": 1e-4}
WORLD = 4


def of_rank(model: nn.Module, number: int, rank: int) -> Tensor:
    """The loss of one rank's micro-batch."""
    batch = ids(number, rank)
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1).flatten())


def train_both(
    model: nn.Module, alone: nn.Module, losses: Callable, windows: list[list[int]], clip: float | None = None, **options
) -> None:
    """As many steps as windows; each has a number of micro-batches for every rank.

    Args:
        losses: ``losses(model, number, rank)``; without a graph, there is nothing to train in it.
    """
    optimizer = forge.attach(model, **ADAMW, clip_grad_norm=clip, process_group=dist.group.WORLD, **options)
    oracle = torch.optim.AdamW(alone.parameters(), **ADAMW)
    for step, window in enumerate(windows):
        for rank, length in enumerate(window):
            for number in range(5 * step, 5 * step + length):
                if rank == dist.get_rank() and (mine := losses(model, number, rank)).requires_grad:
                    mine.backward()
                if (its := losses(alone, number, rank) / WORLD).requires_grad:
                    its.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        for one in (optimizer, oracle):
            one.step()
            one.zero_grad()
        expect_equal_replicas(model)
    expect_equal(model, alone, f"{options}, clip {clip}")


def expect_equal(model: nn.Module, alone: nn.Module, what: str, atol: float = 3e-6) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda m, name=name: f"{what}: {name}: {m}")


@workers
def windows_of_changing_length():
    """A rank may have more micro-batches than another: the mean over the ranks of each one's sum."""
    windows = [[1, 1, 1, 1], [3, 3, 3, 3], [1, 2, 3, 4], [2, 2, 2, 2], [3, 1, 1, 1]]
    for options in ({}, {"sharding": "states"}, {"clip": 0.1}, {"buckets": SMALL}):
        train_both(Model(), Model(), of_rank, windows, accumulation_steps=None, **options)


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = x + torch.tanh(self.layers[index](x))
        return x.square().mean()


@workers
def layers_in_another_order_on_every_rank():  # field log rows 141, 142
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 2, 0], [], [1, 5]]

    def losses(model, number, rank):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        return model(x, orders[(number // 5 + rank) % 5])

    for options in ({}, {"sharding": "states"}, {"clip": 0.1}, {"sharding": "states", "buckets": SMALL}):
        train_both(Ordered(), Ordered(), losses, [[1] * WORLD] * 6, **options)


@workers
def a_graph_that_one_rank_alone_keeps():
    """Its weights wait there, for it might be trained too, and so no other rank may step them before."""
    for checkpointed in (None, False):
        for options in ({}, {"sharding": "states"}, {"buckets": SMALL}):
            model, alone = Model(checkpointed=checkpointed), Model()
            optimizer = forge.attach(model, **ADAMW, process_group=dist.group.WORLD, **options)
            oracle = torch.optim.AdamW(alone.parameters(), **ADAMW)
            for number in range(4):
                kept = of_rank(model, 50, 0) if dist.get_rank() == number % 3 else None
                of_rank(model, number, dist.get_rank()).backward()
                if kept is not None and number == 2:
                    kept.backward()
                optimizer.step()
                optimizer.zero_grad()
                for rank in range(WORLD):
                    (of_rank(alone, number, rank) / WORLD).backward()
                if number == 2:
                    (of_rank(alone, 50, 0) / WORLD).backward()
                oracle.step()
                oracle.zero_grad()
                expect_equal_replicas(model)
            expect_equal(model, alone, f"{options}, checkpointed {checkpointed}")


@workers
def a_graph_that_one_rank_alone_keeps_under_reentrant_checkpoints():
    """What waits is found block by block; it is right, or an error on every rank."""
    model = Model(checkpointed=True)
    optimizer = forge.attach(model, **ADAMW, process_group=dist.group.WORLD, buckets=forge.Buckets(timeout=10))
    for number in range(2):
        kept = of_rank(model, 50, 0) if dist.get_rank() == number == 1 else None
        of_rank(model, number, dist.get_rank()).backward()
        if number == 1:
            with pytest.raises(RuntimeError, match=r"weight: stepped in backward without a part .*waiting=True"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    del kept


class Exchanged(torch.autograd.Function):
    """All-to-all, which each rank of a pair also needs of the other in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, dy: Tensor):
        return Exchanged.forward(ctx, dy, ctx.group), None


@workers
def experts_that_a_rank_skips():  # field log row 63
    """Two pairs of ranks exchange tokens; the ranks that have the same expert sum its gradients.

    The rank that skips it brings its part, zero, in its optimizer's step, which is the first: the others are still in
    their backward.
    """
    pairs, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    rank = dist.get_rank()
    pair, same = pairs[rank // 2], replicas[rank % 2]
    torch.manual_seed(0)
    dense, expert = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]), nn.Linear(8, 8)
    buckets = forge.Buckets(timeout=20)
    optimizers = [
        forge.attach(one, **ADAMW, process_group=group, buckets=buckets)
        for one, group in ((dense, dist.group.WORLD), (expert, same))
    ]
    for number in range(4):
        hidden = torch.tanh(dense[0](torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))))
        tokens = Exchanged.apply(hidden, pair)
        if not (rank == 2 and number % 2):
            tokens = expert(tokens)
        dense[1](hidden + Exchanged.apply(tokens, pair)).square().mean().backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    expect_equal_replicas(dense)
    copies = [torch.empty_like(expert.weight) for _ in range(2)]
    dist.all_gather(copies, expert.weight.detach(), group=same)
    assert torch.equal(*copies)
    assert optimizers[1].state[expert.weight]["step"] == 4


@workers
def micro_batches_that_were_not_announced():  # field log row 15
    for options in ({}, {"sharding": "states"}):
        layer = nn.Linear(1, 1, bias=False)
        optimizer = forge.attach(layer, lr=1e-2, process_group=dist.group.WORLD, **options)
        layer(torch.ones(1, 1)).sum().backward()
        before = weights(layer)
        with pytest.raises(RuntimeError, match=r"^weight: a second backward before step\(\).*accumulation_steps"):
            layer(torch.ones(1, 1)).sum().backward()
        assert all(map(torch.equal, before, weights(layer)))
        layer = nn.Linear(1, 1, bias=False)
        optimizer = forge.attach(layer, lr=1e-2, process_group=dist.group.WORLD, accumulation_steps=4, **options)
        for gradient in (1.0, 2.0, 3.0, 6.0):
            (layer(torch.full((1, 1), gradient)).sum() / 4).backward()
        optimizer.step()
        held = optimizer.state[layer.weight]["exp_avg"]
        assert held.numel() == (1 if not options or dist.get_rank() == 0 else 0)
        torch.testing.assert_close(held, torch.full_like(held, 0.3))


class Adapted(nn.Module):
    def __init__(self, frozen: nn.Linear):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 3, bias=False)
        self.up = nn.Linear(3, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted(checkpointed: bool | None) -> Model:
    model = Model(checkpointed=checkpointed)
    model.head.requires_grad_(False)
    for block in model.blocks:
        block[1], block[3] = Adapted(block[1]), Adapted(block[3])
    return model


@workers
def adapters_under_ddp_and_checkpoints():  # field log row 38
    """Norms are DDP's, which itself refuses reentrant checkpoints with find_unused_parameters."""
    for checkpointed in (None, False, True):
        for unused in (False, True):
            model, alone = adapted(checkpointed), adapted(None)
            optimizer = forge.attach(model, **ADAMW, process_group=dist.group.WORLD)
            oracle = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], **ADAMW)
            called = DistributedDataParallel(model, find_unused_parameters=unused)
            if checkpointed and unused:
                with pytest.raises(RuntimeError, match="_set_static_graph"):
                    loss(called, 0).backward()
                continue
            for number in range(2):
                loss(called, number).backward()
                for rank in range(WORLD):
                    (of_rank(alone, number, rank) / WORLD).backward()
                for one in (optimizer, oracle):
                    one.step()
                    one.zero_grad()
            expect_equal_replicas(model)
            expect_equal(model, alone, f"checkpointed {checkpointed}, unused {unused}")


def _in_bf16(_, bucket):
    sent = (bucket.buffer() / WORLD).bfloat16().float()  # what gloo can add up
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


@workers
def two_optimizers_in_one_ddp_with_a_hook():  # field log row 97
    model, alone = Model(), Model()
    blocks = [list(one.blocks.parameters()) for one in (model, alone)]
    others = [[p for name, p in one.named_parameters() if "blocks" not in name] for one in (model, alone)]
    options = {"process_group": dist.group.WORLD, "accumulation_steps": 2}
    ours = [forge.attach(model, params=blocks[0], **ADAMW, **options)]
    ours.append(forge.attach(model, "sgd", params=others[0], lr=0.1, **options))
    theirs = [torch.optim.AdamW(blocks[1], **ADAMW), torch.optim.SGD(others[1], lr=0.1)]
    called = DistributedDataParallel(model)
    called.register_comm_hook(None, _in_bf16)
    for number in range(6):
        with contextlib.nullcontext() if number % 2 else called.no_sync():
            loss(called, number).backward()
        for rank in range(WORLD):
            (of_rank(alone, number, rank) / WORLD).backward()
        for one in (*ours, *theirs) if number % 2 else ():
            one.step()
            one.zero_grad()
    expect_equal_replicas(model)
    assert {float(state["step"]) for one in ours for state in one.state.values()} == {3.0}
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        # Biases and norms came in bf16; a weight follows them.
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)


@workers
def options_that_differ():  # field log row 148
    one = dist.get_rank() == 1
    for options in (
        {"sharding": "states" if one else "none"},
        {"recipe": "int8" if one else None},
        {"rule": "sgd" if one else "adamw"},
        {"recipe": "sr-store", "seed": int(one)},
        {"buckets": forge.Buckets(nbytes=1000 + one)},
        {"accumulation_steps": 1 + one},
        {"waiting": one},
        {"skip": "atomic" if one else "flag"},
    ):
        model = Model().bfloat16()
        before = weights(model)
        with pytest.raises(
            ValueError, match=r"different on the ranks \(rank 0: .*; rank 1: .*give every rank the same"
        ):
            forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, **options)
        assert all(map(torch.equal, before, weights(model)))


@workers
def norms_asked_for_after_backward_has_stepped():
    for sharding in ("none", "states"):
        _measured(sharding)


def _measured(sharding: str) -> None:
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    optimizer = forge.attach(model, **ADAMW, process_group=dist.group.WORLD, sharding=sharding, buckets=SMALL)
    oracle = torch.optim.AdamW(alone.parameters(), **ADAMW)
    for number in range(3):
        of_rank(model, number, dist.get_rank()).backward()
        for rank in range(WORLD):
            (of_rank(alone, number, rank) / WORLD).backward()
        squares = torch.stack([p.grad.square().sum() for p in alone.parameters()])
        torch.testing.assert_close(optimizer.norms_sq(), squares, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(optimizer.clip_grad_norm_(None), squares.sum().sqrt(), rtol=1e-5, atol=0)
        for one in (optimizer, oracle):
            one.step()
            one.zero_grad()
        expect_equal_replicas(model)
    expect_equal(model, alone, f"measured, sharding={sharding!r}")


def test_on_four_ranks():
    results = workers.results(WORLD)
    for function in workers.functions:
        results[function.__name__]
