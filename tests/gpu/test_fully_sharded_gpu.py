"""On GPUs: sharded weights are stepped on the stream that reduces them, and leave no gradient."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

import torch.distributed as dist
from ranks import run
from sharded_nets import Net, attach, contents, expect_equal, shard, torch_adamw, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import forge_megatron as forge

pytestmark = pytest.mark.timeout(600)

WORLD = min(2, torch.cuda.device_count())
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _steps():
    names = ("replica", "shard")
    meshes = {"one": None, "replicated": init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=names)}
    for policy in ({}, MIXED):
        for mesh in meshes.values():
            found = []
            for ours in (True, False):
                sharding = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
                net = shard(Net(), mesh, **sharding)
                optimizer = attach(net) if ours else torch_adamw(net, foreach=False)
                train(net, optimizer, steps=5)
                found.append(contents(net, optimizer))
            expect_equal(*found, ulps=8)


def test_steps_equal_torch_optim_on_the_same_shards():
    run(WORLD, _steps, backend="nccl")


def _memory():
    """(bytes that a backward leaves, peak of a step beside weights and states), of FORGE and of torch."""
    width, layers = 2048, 8
    found = {}
    for ours in (True, False):
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to("cuda", torch.bfloat16)
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        optimizer = forge.attach(net, lr=1e-3) if ours else torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        for step in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            net(torch.ones(16, width, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
            torch.cuda.synchronize()
            left = torch.cuda.memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                found[ours] = left, torch.cuda.max_memory_allocated() - before
        del net, optimizer
    pool = layers * width * width * 2 // dist.get_world_size()
    return found[True], found[False], pool


def test_no_gradient_pool():
    for (left, peak), (torch_left, torch_peak), pool in run(WORLD, _memory, backend="nccl"):
        assert left <= 1 << 16
        assert torch_left >= pool
        assert peak <= torch_peak - pool // 2


def _late_step():
    """A step that is slow on its stream: the next forward gathers what it leaves, not what it found."""
    found = []
    launch = forge.coordinator.FullySharded._launch

    def slow(self):
        torch.cuda._sleep(20_000_000)
        launch(self)

    for launching in (slow, launch):
        forge.coordinator.FullySharded._launch = launching
        net = shard(Net())
        optimizer = attach(net)
        train(net, optimizer, steps=4)
        found.append(contents(net, optimizer))
    expect_equal(*found, ulps=0)


def test_the_next_gather_waits_for_the_step():
    run(WORLD, _late_step, backend="nccl")
