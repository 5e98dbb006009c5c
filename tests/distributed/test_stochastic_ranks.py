"""Stochastic rounding over ranks: unbiased on every sharding, equal on replicas, fresh at each step, and resumed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forge_megatron as forge
from forge_megatron.formats.noise import random_bits
from tests.cpu.training import expect_bit_equal, snapshot

pytestmark = pytest.mark.timeout(600)

BF16 = torch.bfloat16


def _walk(data: int, plan) -> tuple[float, float]:
    """Mean and spread of 1e5 weights of 1 after a hundred updates of 1e-3."""
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(nn.Linear(400, 250, bias=False, dtype=BF16))
    nn.init.ones_(net[0].weight)
    if plan is not None:
        parallelize_module(net, mesh["tensor"], {"0": plan})
    fully_shard(net, mesh=mesh["data"])
    optimizer = forge.attach(net, "sgd", lr=1e-3, recipe="sr-store")
    x = torch.ones(1, 400, dtype=BF16)
    if isinstance(plan, RowwiseParallel):
        x = x.chunk(mesh["tensor"].size(), 1)[mesh["tensor"].get_local_rank()]
    for _ in range(100):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = net[0].weight.full_tensor().double()
    return whole.mean().item(), whole.std().item()


def _walks() -> list[tuple[float, float]]:
    return [_walk(2, None), _walk(1, ColwiseParallel()), _walk(1, RowwiseParallel())]


def test_the_mean_of_a_sharded_weight_is_exact():  # field log row 107
    """FSDP 2 and TP 2: the value of field row 98 on one process."""
    for found in run(2, _walks):
        for mean, spread in found:
            assert abs(mean - 0.9) <= 3e-4
            assert abs(spread - 0.017) < 1e-3


def _bits() -> None:
    """Of weights that both of a mesh's dimensions cut, also into uneven rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for plan in (ColwiseParallel(), RowwiseParallel()):
        net = nn.Sequential(nn.Linear(12, 10, dtype=BF16))
        alone = forge.attach(copy.deepcopy(net), lr=1e-3, recipe="sr-store")
        whole = [random_bits(alone.random.of(p), 0, p.numel()).view(p.shape) for p in alone.names]
        fully_shard(parallelize_module(net, mesh["tensor"], {"0": plan}), mesh=mesh["data"])
        optimizer = forge.attach(net, lr=1e-3, recipe="sr-store")
        for p, expected in zip(net.parameters(), whole, strict=True):
            mine = p.to_local()
            bits = random_bits(optimizer.random.of(p), 0, mine.numel()).view(mine.shape)
            placed = distribute_tensor(expected, p.device_mesh, p.placements, src_data_rank=None)
            assert torch.equal(bits, placed.to_local()), (plan, p.placements)


def test_the_bits_of_a_weight_that_is_cut_twice_are_the_wholes():
    run(4, _bits)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(BF16)


def _attached(net, **options) -> forge.ForgeOptimizer:
    return forge.attach(net, lr=1e-3, recipe="sr-store", seed=5, process_group=dist.group.WORLD, **options)


def _train(net, optimizer, steps) -> None:
    """Every rank has tokens of its own; after each step all replicas are equal, and the next step's bits are others."""
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        net(torch.randn(5, 6, generator=generator).to(BF16)).float().square().mean().backward()
        optimizer.step()
        bits = [random_bits(optimizer.random.of(p), 0, p.numel()) for p in net.parameters()]
        optimizer.zero_grad()
        for p in net.parameters():
            first = p.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(p, first), step
        for before, now in zip(getattr(optimizer, "bits_before", ()), bits, strict=False):
            assert (before == now).float().mean() < 0.01, step
        optimizer.bits_before = bits


def _fifty_steps() -> None:
    net = _net()
    optimizer = _attached(net)
    _train(net, optimizer, range(25))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    _train(net, optimizer, range(25, 50))
    resumed = _net()
    again = _attached(resumed)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    _train(resumed, again, range(25, 50))
    expect_bit_equal(snapshot(net, optimizer), snapshot(resumed, again))
    sharded = _net()
    states = _attached(sharded, sharding="states")
    _train(sharded, states, range(50))
    expect_bit_equal(list(net.parameters()), list(sharded.parameters()))
    assert all((p != q).any() for p, q in zip(net.parameters(), _net().parameters(), strict=True))


def test_fifty_steps_of_two_replicas_with_a_resume_in_the_middle():  # field log row 108
    run(2, _fifty_steps)
