"""DistributedDataParallel around an attached model, whose forwards do not all read an owned weight; and without it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import forge_megatron as forge
from tests.distributed.ranks import Workers
from tests.distributed.twins import Model, close, expect_equal_replicas, loss, weights

workers = Workers()
#: An error and not a long wait, where ranks miss each other.
BUCKETS = forge.Buckets(timeout=10)


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


class Branch(nn.Module):
    """A scale and a norm that every forward reads, and a linear that it may skip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear, self.scale = nn.LayerNorm(8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        x = self.norm(x) * self.scale
        return x if skips else self.linear(x)


class Pair:
    """One model attached and wrapped, and its copy under DistributedDataParallel and torch.optim.AdamW."""

    def __init__(self, **options):
        model, self.alone = Branch(), Branch()
        options = {"lr": 1e-2, "process_group": dist.group.WORLD, "buckets": BUCKETS, **options}
        steppers = forge.attach(model, **options), torch.optim.AdamW(self.alone.parameters(), lr=1e-2)
        wrapped = [DistributedDataParallel(one, find_unused_parameters=True) for one in (model, self.alone)]
        self.model, self.pairs = model, list(zip(wrapped, steppers, strict=True))

    def window(self, number: int, *skips: bool) -> None:
        """Micro-batches, the last of which is reduced."""
        for called, optimizer in self.pairs:
            for index, skip in enumerate(skips[:-1]):
                with called.no_sync():
                    self.loss(called, 10 * number + index, skip).backward()
            self.loss(called, 10 * number + 9, skips[-1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def loss(called: nn.Module, number: int, skips: bool) -> Tensor:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        return (called(x, skips) - x.sin()).square().mean()

    def expect_equal(self) -> None:
        for (name, ours), theirs in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            close(name, ours, theirs, 2e-6)
        expect_equal_replicas(self.model)


@workers
def a_last_micro_batch_that_skips_the_owned_weights():
    """Outside no_sync it is reduced, on the rank that skips them too; inside it is refused."""
    pair = Pair(accumulation_steps=2)
    for number in range(4):
        pair.window(number, False, dist.get_rank() == 1 and number > 0)
    pair.expect_equal()
    called, optimizer = pair.pairs[0]
    before = weights(pair.model)
    pair.loss(called, 7, False).backward()
    with called.no_sync():
        pair.loss(called, 8, True).backward()
    with pytest.raises(RuntimeError, match=r"(scale|norm\.weight): step\(\), but the last backward was inside no_sync"):
        optimizer.step()
    assert all(map(torch.equal, before, weights(pair.model)))


@workers
def a_first_window_in_which_a_rank_skips_the_owned_weights():
    """What DistributedDataParallel reduces is not summed again, though this rank has read no owned weight in it."""
    for options in ({"waiting": True}, {"skip": "atomic"}, {"accumulation_steps": None}):
        for skipping in (lambda rank: rank == 1, lambda rank: True):
            pair = Pair(**options)
            for number in range(3):
                pair.window(number, number == 0 and skipping(dist.get_rank()))
            pair.expect_equal()


@workers
def uneven_inputs_by_join():
    """It has the collectives of DistributedDataParallel run on a rank whose data has ended, and not ours."""
    model = Model()
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=BUCKETS)
    called = DistributedDataParallel(model)
    before = weights(model)
    refused = pytest.raises(NotImplementedError, match=r"join\(\).*give a rank whose data has ended an empty batch")
    with refused, called.join():
        loss(called, 0).backward()
    assert all(map(torch.equal, before, weights(model)))
    assert optimizer.owned


@workers
def what_is_ordinary_again_is_reduced():
    """A copy of an attached model, and a detached one, in a DistributedDataParallel with torch's own optimizer."""
    model = Model()
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, buckets=BUCKETS)
    twin = copy.deepcopy(model)
    optimizer.detach()
    for ordinary in (twin, model):
        called = DistributedDataParallel(ordinary)
        stepper = torch.optim.AdamW(ordinary.parameters(), lr=1e-2)
        for number in range(2):
            loss(called, number).backward()
            stepper.step()
            stepper.zero_grad()
        expect_equal_replicas(ordinary)


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_on_two_ranks(results, name):
    results[name]
