"""Experts in one tensor whose gradients are partial over data-parallel ranks, against DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn

import forge_megatron as forge
from tests.distributed.ranks import run
from tests.distributed.twins import Twins

EXPERTS, WIDTH = 5, 12
#: A bucket of one expert: both weights are cut between experts.
SMALL = forge.Buckets(nbytes=4 * WIDTH * 19, count=2)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = forge.GroupedLinear(EXPERTS, WIDTH, 19), forge.GroupedLinear(EXPERTS, 19, WIDTH)

    def forward(self, x, ends):
        return x + self.down(torch.tanh(self.up(self.norm(x), ends)), ends)


def loss(model, number: int):
    """Expert 2 never has a token, others have some on one rank only; in the third batch the last rank has none."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    tokens = torch.randint(0, 4, (EXPERTS,), generator=generator)
    tokens[2] = 0
    if number == 2 and dist.get_rank() == dist.get_world_size() - 1:
        tokens.zero_()
    x = torch.randn(int(tokens.sum()), WIDTH, generator=generator)
    return model(x, torch.cumsum(tokens, 0, dtype=torch.int32)).square().sum() / 10


def trained() -> None:
    sharded = {"sharding": "states"}
    # Six micro-batches are more segments than a launch takes.
    for options in ({"buckets": SMALL}, {"clip": 0.1, **sharded}, {"buckets": SMALL, **sharded}, {"micro_batches": 6}):
        twins = Twins(Experts(), **options)
        assert {twins.model.up.weight, twins.model.down.weight} <= twins.optimizer.owned.keys()
        twins.train(3 if "micro_batches" not in options else 1, loss).expect_equal()


def test_experts_train_as_under_ddp_with_empty_experts_and_ranks():
    run(3, trained)
