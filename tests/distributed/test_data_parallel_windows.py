"""Windows over data-parallel ranks that end otherwise than in a step, or read a weight in two ways."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from forge_megatron.coordinator.bucket import LEAST
from tests.cpu.training import Fails
from tests.distributed.ranks import Workers
from tests.distributed.twins import expect_equal_replicas, weights

workers = Workers()
WIDTH, LAYERS = 8, 6
#: Bytes of one layer's gradient in a bucket, with its flag and what aligns it.
ONE = 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def layers() -> nn.ModuleList:
    torch.manual_seed(2)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def loss(model: nn.ModuleList, number: int, fails_below: int | None = None) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    for index, layer in enumerate(model):
        x = layer(Fails.apply(x) if index == fails_below else x).tanh()
    return x.square().mean()


def fail(model: nn.ModuleList, optimizer: forge.ForgeOptimizer, fails_below: int) -> tuple[str, list[str]]:
    """A backward that raises on every rank after the layers from ``fails_below`` on.

    Returns:
        What a step after it says, and which weights have changed.
    """
    before = weights(model)
    with pytest.raises(ArithmeticError):
        loss(model, 1, fails_below).backward()
    with pytest.raises(RuntimeError) as told:
        optimizer.step()
    changed = [name for (name, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)]
    return str(told.value), changed


@workers
def a_backward_that_fails_before_a_bucket_is_sent():
    """Nothing has changed anywhere: the window can be discarded, and training goes on as if it had not been."""
    for options in ({}, {"sharding": "states"}):
        for leave in ("zero_grad", "rollback"):
            model = layers()
            undisturbed = copy.deepcopy(model)
            optimizers = [
                forge.attach(one, lr=1e-2, process_group=dist.group.WORLD, **options) for one in (model, undisturbed)
            ]
            told, changed = fail(model, optimizers[0], 2)
            assert not changed
            assert told.startswith("the last backward failed; call zero_grad()"), told
            assert getattr(optimizers[0], leave)() in (None, True)
            for number in range(2):
                for one, optimizer in zip((model, undisturbed), optimizers, strict=True):
                    loss(one, number).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert all(map(torch.equal, weights(model), weights(undisturbed)))
            expect_equal_replicas(model)


@workers
def a_backward_that_fails_names_what_it_has_changed():
    """Backward has reached all layers but one; of these the last are in a bucket that is not full, or on the wire."""
    for options in ({}, {"sharding": "states"}):
        for layers_in_one in (1, 2):
            model = layers()
            buckets = forge.Buckets(nbytes=layers_in_one * ONE, count=2)
            optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=buckets, **options)
            told, changed = fail(model, optimizer, 1)
            assert 0 < len(changed) < LAYERS - 1
            found = re.search(r"failed after it had updated (\d) of 6 weights \(the first is (\d\.weight)\)", told)
            assert found, told
            assert (int(found[1]), found[2]) == (len(changed), min(changed))
            optimizer.zero_grad()
            assert not optimizer.rollback()
            with pytest.raises(RuntimeError, match="had updated"):
                loss(model, 2).backward()


@workers
def a_backward_that_fails_when_a_bucket_is_on_the_wire():
    """It has changed nothing here, but may have on a rank that went on."""
    for options in ({}, {"sharding": "states"}):
        model = layers()
        buckets = forge.Buckets(nbytes=ONE, count=2)
        optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=buckets, **options)
        told, changed = fail(model, optimizer, LAYERS - 1)
        assert not changed
        assert "had sent the gradients of 1 of 6 weights (the first is 5.weight)" in told, told
        assert not optimizer.rollback()
        with pytest.raises(RuntimeError, match="which other ranks may have stepped"):
            loss(model, 2).backward()


@workers
def a_graph_of_one_rank_alone_that_reads_a_weight_without_its_module():
    """It waits on every rank until both backwards of that rank are through."""
    world = dist.get_world_size()
    for options in ({}, {"sharding": "states"}):
        model, alone = layers(), layers()
        optimizer = forge.attach(model, lr=1e-2, eps=1e-4, process_group=dist.group.WORLD, **options)
        oracle = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-4)
        for number in range(2):
            read = F.linear(torch.ones(1, WIDTH, requires_grad=True), model[2].weight).square().mean()
            loss(model, number).backward()
            if dist.get_rank() == 0:
                read.backward()
            optimizer.step()
            optimizer.zero_grad()
            (F.linear(torch.ones(1, WIDTH), alone[2].weight).square().mean() / world).backward()
            for rank in range(world):
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
                for layer in alone:
                    x = layer(x).tanh()
                (x.square().mean() / world).backward()
            oracle.step()
            oracle.zero_grad()
            expect_equal_replicas(model)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


@workers
def buckets_of_no_given_size():
    """Their size follows from the model, be the ranks compared or not, and the table says what is held."""
    for sharding in ("none", "states"):
        model = nn.Linear(1024, 1024)
        options = {"lr": 1e-2, "process_group": dist.group.WORLD, "sharding": sharding}
        told = [forge.attach(copy.deepcopy(model), **options).coverage.bucket_bytes]
        optimizer = forge.ForgeOptimizer(model.parameters(), **options)
        told.append(optimizer.coverage.bucket_bytes)
        model(torch.ones(1, 1024)).square().mean().backward()
        optimizer.step()
        told += [optimizer.coverage.bucket_bytes, optimizer._sums.pipeline.nbytes]
        assert len(set(told)) == 1, told
        assert told[0] < optimizer._plan.buckets.count * 1.1 * LEAST


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_on_two_ranks(results, name):
    results[name]
