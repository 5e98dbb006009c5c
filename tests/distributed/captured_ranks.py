"""A training step over data-parallel ranks, as it is and captured: losses, norms, weights and states of every step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import forge_megatron as forge
from tests.distributed.twins import Model, expect_equal_replicas, ids

STEPS = 8

#: Schedules over ranks: in backward and in step(), whole states and rows of them, one bucket and many.
ARMS = {
    "in backward": {},
    "small buckets": {"buckets": forge.Buckets(nbytes=640, count=2)},
    "clipped": {"clip_grad_norm": 0.1},
    "each clipped, atomic": {"clip_grad_norm": 0.1, "clip": "weight", "skip": "atomic"},
    "sharded states": {"sharding": "states"},
    "sharded states, clipped": {"sharding": "states", "clip_grad_norm": 0.1, "recipe": "fp32-master"},
    "sharded states of 8 bits": {"sharding": "states", "state_format": "int8", "buckets": forge.Buckets(nbytes=4096)},
    "rounded stochastically": {"recipe": "sr-store"},
    "a rule in stages": {"rule": "adafactor"},
    "in the order of the ranks": {"buckets": forge.Buckets(deterministic=True)},
}


def train(name: str, device: str = "cpu", *, captured: bool) -> list[list[torch.Tensor]]:
    """Trains an arm; returns of each step what it computed and left."""
    options = dict(ARMS[name])
    torch.manual_seed(3)
    model = Model().to(device, torch.bfloat16 if "recipe" in options else torch.float32)
    rule = options.pop("rule", "adamw")
    optimizer = forge.attach(model, rule, lr=1e-2, process_group=dist.group.WORLD, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(batch):
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if captured:
        step = optimizer.capture(step)
    trace = []
    for number in range(STEPS):
        loss = step(ids(number).to(device))
        schedule.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        found = [loss, optimizer.grad_norm, *optimizer.gradient_norms.values(), *model.parameters(), *states]
        trace.append([tensor.detach().clone() for tensor in found])
    expect_equal_replicas(model)
    return trace


def expect_equal_steps(captured: list[list[torch.Tensor]], eager: list[list[torch.Tensor]]) -> None:
    for number, (ours, theirs) in enumerate(zip(captured, eager, strict=True)):
        assert len(ours) == len(theirs) > 20
        assert all(map(torch.equal, ours, theirs)), f"step {number}"
    assert not torch.equal(captured[0][0], captured[-1][0])
