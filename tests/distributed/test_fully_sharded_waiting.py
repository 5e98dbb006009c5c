"""Sharded weights that wait for step(): clipping, accumulation, late scales; and what is left in memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from sharded_nets import WIDTH, Net, attach, contents, expect_equal, loss_of, shard, torch_adamw, train, whole
from torch import nn
from torch.distributed.fsdp import fully_shard

import forge_megatron as forge
from forge_megatron import kernels

pytestmark = pytest.mark.timeout(600)

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@contextmanager
def counted(module, name: str) -> Iterator[list[int]]:
    """A list that grows by one for each call of ``module.name``: the number of its first argument's items."""
    counts = []
    original = getattr(module, name)

    def counting(*args, **kwargs):
        counts.append(len(args[0]) if args else 0)
        return original(*args, **kwargs)

    with patch.object(module, name, counting):
        yield counts


@workers
def _arrival():
    net = shard(Net())
    optimizer = attach(net)
    before = {name: whole(p) for name, p in net.named_parameters()}
    with counted(kernels, "step") as launches:
        loss_of(net, 0).backward()
    after = {name: whole(p) for name, p in net.named_parameters()}
    return {
        "launches": launches,
        "unchanged": [name for name in before if torch.equal(before[name], after[name])],
        "counts": [float(optimizer.state[p]["step"]) for p in net.parameters()],
        "how": {row.how for row in optimizer.coverage},
        "bytes": optimizer.coverage.state_bytes - sum(2 * p.to_local().nbytes for p in net.parameters()),
        "left": [name for name, p in net.named_parameters() if p.grad is not None],
    }


def test_every_parameter_is_stepped_in_backward_by_one_launch_a_group_and_keeps_no_gradient(results):  # row 53
    for found in results["_arrival"]:
        # Backward comes to the blocks first; the root's group ends with the embedding.
        assert found["launches"] == [6, 6, 4]
        assert found["unchanged"] == []
        assert found["counts"] == [1.0] * 16
        assert found["left"] == []
        assert found["bytes"] == 0
        assert found["how"] == {"sharded: stepped where its reduced shard arrives"}


def bytes_left(forge_steps: bool, **options) -> tuple[int, int]:
    """(bytes of the storages that a backward made and left, bytes of this rank's shards) of a stack of layers."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = forge.attach(net, lr=1e-3, **options) if forge_steps else torch.optim.AdamW(net.parameters())
    for _ in range(2):  # in the second step FSDP2 has every buffer that it keeps
        loss = net(torch.ones(4, 32)).square().mean()
        before = storages()
        loss.backward()
        # A thread of gloo's may hold the last tensor that it reduced for a moment longer, torch's arm too:
        # of several looks the one that finds least.
        left = min(sum(new for at, new in storages().items() if at not in before) for _ in looks(5))
        optimizer.step()
        optimizer.zero_grad()
    return left, sum(p.to_local().nbytes for p in net.parameters())


def looks(number: int) -> Iterator[None]:
    """``number`` moments, 50 ms apart."""
    for _ in range(number):
        yield
        time.sleep(0.05)


def storages() -> dict[int, int]:
    """Pointer and bytes of every storage that a tensor holds."""
    gc.collect()
    tensors = [it for it in gc.get_objects() if isinstance(it, torch.Tensor)]
    tensors = [it._local_tensor if hasattr(it, "_local_tensor") else it for it in tensors]
    tensors += [it.grad.to_local() for it in tensors if it.is_leaf and hasattr(it.grad, "to_local")]
    return {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors if it.numel()}


@workers
def _memory():
    return {
        "on arrival": bytes_left(True),
        "waiting": bytes_left(True, clip_grad_norm=1.0),
        "torch": bytes_left(False),
    }


def test_a_backward_leaves_no_gradient_but_those_that_wait(results):  # row 145
    for found in results["_memory"]:
        shards = 4 * 32 * 32 * 4 // 2
        assert found == {"on arrival": (0, shards), "waiting": (shards, shards), "torch": (shards, shards)}


@workers
def _clipping():
    net = shard(Net())
    optimizer = attach(net, clip_grad_norm=0.05)
    reported = []
    for step in range(3):
        loss_of(net, 10 * step).backward()
        optimizer.step()
        optimizer.zero_grad()
        reported.append(float(optimizer.grad_norm))
    for ranks in (None, range(dist.get_world_size())):
        twin = shard(Net()) if ranks is None else Net()
        oracle = torch_adamw(twin)
        norms = train(twin, oracle, clip=0.05, ranks=ranks)
        torch.testing.assert_close(reported, norms, rtol=1e-6, atol=0)
        expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=16)
    # On arrival the norm is the same number, known after the step, and so is each weight's.
    net = shard(Net())
    optimizer = attach(net)
    train(net, optimizer, steps=1)
    torch.testing.assert_close(float(optimizer.grad_norm), norms[0], rtol=1e-6, atol=0)
    loss_of(net_alone := Net(), 0, range(dist.get_world_size())).backward()
    expected = {name: p.grad.norm() for name, p in net_alone.named_parameters()}
    torch.testing.assert_close(optimizer.gradient_norms, expected, rtol=1e-5, atol=1e-9)


def test_clipping_counts_every_shard_once(results):
    results["_clipping"]


@workers
def _accumulation():
    everybody = range(dist.get_world_size())
    twin = Net()
    oracle = torch_adamw(twin)
    train(twin, oracle, micro_batches=3, ranks=everybody)
    expected = contents(twin, oracle)
    net = shard(Net())
    optimizer = attach(net, accumulation_steps=3)
    train(net, optimizer, micro_batches=3)
    expect_equal(contents(net, optimizer), expected, ulps=16)
    # FSDP2's own way: gradients stay on the rank until the last micro-batch, which alone is reduced.
    reduce_scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    counts = {}
    for micro_batches, accumulation_steps in ((1, 1), (3, 3), (3, 1)):
        net = shard(Net())
        optimizer = attach(net, accumulation_steps=accumulation_steps)
        with counted(dist, reduce_scatter) as reduced:
            for step in range(3):
                for micro_batch in range(micro_batches):
                    net.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                    (loss_of(net, 10 * step + micro_batch) / micro_batches).backward()
                optimizer.step()
                optimizer.zero_grad()
        if micro_batches == 3:
            expect_equal(contents(net, optimizer), expected, ulps=16)
        counts[micro_batches, accumulation_steps] = len(reduced)
    return counts


def test_accumulation_and_the_number_of_reductions(results):  # row 19
    for counts in results["_accumulation"]:
        assert counts == {(1, 1): 9, (3, 3): 9, (3, 1): 9}


@workers
def _sixteen_bits():
    found = {}
    for recipe in (None, "fp32-master"):
        net = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        fully_shard(net)
        optimizer = forge.attach(net, lr=1e-3, accumulation_steps=2, recipe=recipe, state_format=None)
        for value in (256.0, 1.0):
            net(torch.full((1, 4), value, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        found[recipe or "bf16"] = (whole(optimizer.state[net.weight]["exp_avg"]) / 0.1).unique().tolist()
        found[f"{recipe} norm"] = float(optimizer.grad_norm)
    return found


def test_micro_batches_of_a_16_bit_weight_are_summed_in_fp32(results):  # row 20
    for found in results["_sixteen_bits"]:
        assert found["fp32-master"] == pytest.approx([257.0], rel=1e-6)
        assert found["None norm"] == found["fp32-master norm"] == pytest.approx(257.0 * 24**0.5, rel=1e-6)


@workers
def _late_scale():
    net, twin = shard(Net()), shard(Net())
    optimizer, oracle = attach(net, waiting=True), torch_adamw(twin)
    for step in range(2):
        (loss_of(net, step) * 5).backward()
        optimizer.step(gradient_multiplier=torch.tensor(0.2))
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        oracle.step()
        oracle.zero_grad()
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=16)


def test_a_late_scale(results):
    results["_late_scale"]


@workers
def _not_finite():
    net = shard(Net())
    optimizer = attach(net)
    before = contents(net, optimizer)
    poisoned = net.head.bias.to_local().shape[0] > 0 and dist.get_rank() == 0
    loss = loss_of(net, 0)
    if poisoned:
        loss = loss + net.head.bias[0] * torch.tensor(float("nan"))
    loss.backward()
    optimizer.step()
    after = contents(net, optimizer)
    kept = [name for name in before if name.startswith("head.bias") and "step" not in name]
    return {
        "first row kept": all(torch.equal(before[name][0], after[name][0]) for name in kept),
        "others stepped": not any(torch.equal(before[name][1:], after[name][1:]) for name in kept),
        "finite": all(bool(value.isfinite().all()) for value in after.values()),
        "norm": float(optimizer.grad_norm),
    }


def test_a_coordinate_with_a_gradient_that_is_not_finite_keeps_its_bits(results):
    for found in results["_not_finite"]:
        assert found["first row kept"]
        assert found["others stepped"]
        assert found["finite"]
        assert found["norm"] != found["norm"]


@workers
def _frozen_and_paused():
    net, twin = shard(Net()), shard(Net())
    for model in (net, twin):
        model.blocks[0].requires_grad_(False)
        model.head.weight.requires_grad_(False)
    optimizer = attach(net)
    oracle = torch_adamw(twin)
    train(net, optimizer)
    train(twin, oracle)
    assert not optimizer.state[net.head.weight]
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)
    before = contents(net, optimizer)
    hidden = torch.ones(2, 3, WIDTH, requires_grad=True)
    with optimizer.paused():
        net.blocks[1](hidden).square().mean().backward()
    assert hidden.grad is not None
    expect_equal(contents(net, optimizer), before, ulps=0)
    for model in (net, twin):
        model.requires_grad_(True)
    train(net, optimizer, first=3)
    train(twin, oracle, first=3)
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)


def test_frozen_unfrozen_and_paused(results):
    results["_frozen_and_paused"]


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, h):
        return h + self.base(h) + self.up(self.down(h))


class AdaptedNet(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Adapted(), Adapted()])

    def forward(self, tokens):
        h = self.embedding(tokens)
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
        return self.head(h)


@workers
def _adapters():
    net, alone = shard(AdaptedNet()), AdaptedNet()
    optimizer, oracle = attach(net), torch_adamw(alone)
    train(net, optimizer, steps=2)
    train(alone, oracle, steps=2, ranks=range(dist.get_world_size()))
    expect_equal(contents(net, optimizer), contents(alone, oracle), ulps=8)


def test_adapters_on_a_frozen_base_under_checkpointing(results):  # row 46
    results["_adapters"]


class Checkpointed(Net):
    reentrant = False

    def forward(self, tokens):
        h = self.embedding(tokens) * self.scale.sum()
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h)


@workers
def _checkpointing():
    launches = {}
    for reentrant in (False, True):
        Checkpointed.reentrant = reentrant
        net, twin = shard(Checkpointed()), shard(Net())
        optimizer, oracle = attach(net), torch_adamw(twin)
        with counted(kernels, "step") as launches[reentrant]:
            train(net, optimizer)
        train(twin, oracle)
        expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)
    return launches


def test_checkpointed_blocks_are_stepped_on_arrival(results):
    for launches in results["_checkpointing"]:
        assert launches == {False: [6, 6, 4] * 3, True: [6, 6, 4] * 3}


@workers
def _update_norms():
    net = shard(Net())
    optimizer = attach(net)
    before = {name: p.to_local().clone() for name, p in net.named_parameters()}
    with optimizer.measuring_updates():
        train(net, optimizer, steps=1)
    moved = {name: (p.to_local() - before[name]).norm() for name, p in net.named_parameters()}
    torch.testing.assert_close(optimizer.update_norms, moved, rtol=1e-5, atol=1e-9)


def test_update_norms_of_a_ranks_shards(results):
    results["_update_norms"]


@workers
def _clipping_weight_by_weight():
    net, alone = shard(Net()), Net()
    optimizer, oracle = attach(net, clip_grad_norm=0.02, clip="weight"), torch_adamw(alone)
    for step in range(2):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(alone, step, range(dist.get_world_size())).backward()
        for p in alone.parameters():
            nn.utils.clip_grad_norm_([p], 0.02)
        oracle.step()
        oracle.zero_grad()
    expect_equal(contents(net, optimizer), contents(alone, oracle), ulps=16)


def test_clipping_weight_by_weight_reads_the_norm_of_the_whole_weight(results):
    results["_clipping_weight_by_weight"]
