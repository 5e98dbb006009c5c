"""A head with its loss over data-parallel ranks: its gradient is formed anew from the weight, whose step must wait."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import forge_megatron as forge
from tests.distributed.ranks import Workers
from tests.distributed.twins import SMALL, expect_equal_replicas

workers = Workers()
VOCABULARY = 21


class Language(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.head = nn.Linear(12, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight


def loss(model: Language, number: int, rank: int, *, fused: bool) -> Tensor:
    """The sum over the tokens; the first rank has none in the second micro-batch."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    ids = torch.randint(VOCABULARY, (15,), generator=generator)[: 0 if (rank, number) == (0, 1) else None]
    hidden = torch.tanh(model.embedding(ids))
    if fused:
        return forge.vocab.linear_cross_entropy(hidden, model.head, ids.roll(1), reduction="sum")
    return F.cross_entropy(model.head(hidden), ids.roll(1), reduction="sum")


def train_both(tied: bool, micro_batches: int = 1, **options) -> None:
    """Three steps against one process that has every rank's tokens."""
    model, alone = Language(tied), Language(tied)
    world = dist.get_world_size()
    adamw = {"lr": 1e-2, "eps": 1e-4}
    optimizer = forge.attach(
        model, **adamw, accumulation_steps=micro_batches, process_group=dist.group.WORLD, **options
    )
    oracle = torch.optim.AdamW(alone.parameters(), **adamw)
    for number in range(3 * micro_batches):
        loss(model, number, dist.get_rank(), fused=True).backward()
        for rank in range(world):
            (loss(alone, number, rank, fused=False) / world).backward()
        if number % micro_batches == micro_batches - 1:
            if "clip_grad_norm" in options:
                nn.utils.clip_grad_norm_(alone.parameters(), options["clip_grad_norm"])
            for one in (optimizer, oracle):
                one.step()
                one.zero_grad()
    expect_equal_replicas(model)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6, msg=lambda m, name=name: f"{options} {name}: {m}")


@workers
def stepped_in_backward():
    for tied in (False, True):
        for options in ({}, {"buckets": SMALL}, {"sharding": "states"}, {"sharding": "states", "buckets": SMALL}):
            train_both(tied, **options)


@workers
def clipped_or_accumulated():
    for options in ({"clip_grad_norm": 0.1}, {"micro_batches": 2}, {"micro_batches": 2, "sharding": "states"}):
        train_both(True, **options)


@workers
def a_second_backward():
    """Refused, and the head is stepped when the first one ends."""
    model = Language(False)
    optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD)
    before = model.head.weight.detach().clone()
    loss(model, 0, 1, fused=True).backward()
    after = model.head.weight.detach().clone()
    assert not torch.equal(after, before)
    with pytest.raises(RuntimeError, match=r"weight: a second backward before step"):
        loss(model, 2, 1, fused=True).backward()
    assert torch.equal(after, model.head.weight)
    del optimizer
    expect_equal_replicas(model)


@pytest.mark.parametrize("world", [2, 4])
def test_a_head_with_its_loss(world):
    results = workers.results(world)
    for function in workers.functions:
        results[function.__name__]
