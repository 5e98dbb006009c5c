"""Weights that the user's ``fully_shard`` calls sharded: steps on arrival against torch.optim, sharded and not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Workers, run
from sharded_nets import Net, attach, contents, expect_equal, shard, torch_adamw, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forge_megatron as forge

pytestmark = pytest.mark.timeout(600)

workers = Workers()


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return workers.results(request.param)


def of_one_process(**options):
    net = Net(**options)
    optimizer = torch_adamw(net)
    train(net, optimizer, ranks=range(dist.get_world_size()))
    return contents(net, optimizer)


def pair(policy=None, mesh=None, net_options=None, **options):
    """(FORGE's, FSDP2's with torch.optim.AdamW) contents after the same steps."""
    sharding = {"mp_policy": policy} if policy is not None else {}
    sharding |= {"reshard_after_forward": options.pop("reshard")} if "reshard" in options else {}
    found = []
    for ours in (True, False):
        net = shard(Net(**(net_options or {})), mesh, **sharding)
        optimizer = attach(net, **options) if ours else torch_adamw(net)
        train(net, optimizer)
        found.append(contents(net, optimizer))
    return found


@workers
def _steps():
    ours, theirs = pair()
    expect_equal(ours, theirs, ulps=0)
    expect_equal(ours, of_one_process(), ulps=8)


def test_steps_equal_torch_optim_on_the_same_shards_and_in_one_process(results):
    results["_steps"]


@workers
def _resharding():
    for reshard in (False, dist.get_world_size() // 2 if dist.get_world_size() > 2 else True):
        expect_equal(*pair(reshard=reshard), ulps=0)


def test_reshard_after_forward(results):
    results["_resharding"]


@workers
def _mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expect_equal(*pair(policy), ulps=0)


def test_the_sharded_fp32_parameter_is_the_master_under_mixed_precision(results):
    results["_mixed_precision"]


@workers
def _replicated_shards():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
    expect_equal(*pair(mesh=mesh), ulps=0)


def test_a_mesh_that_replicates_shards(results):
    results["_replicated_shards"]


@workers
def _tied_and_twice():
    for options in ({"tied": True}, {"twice": True}):
        ours, theirs = pair(net_options=options)
        expect_equal(ours, theirs, ulps=0)
        expect_equal(ours, of_one_process(**options), ulps=8)


def test_a_tied_weight_and_a_module_called_twice(results):  # row 29
    results["_tied_and_twice"]


class Constant(nn.Module):
    """Its gradients are constants that bf16 holds, so that any number of ranks has the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.matrix, self.vector = (nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((7, 12), (5,)))

    def forward(self, scale):
        return (self.matrix * scale).sum() + (self.vector * (2 * scale)).sum()


@workers
def _stochastic_rounding():
    found = []
    for sharded in (True, False):
        net = Constant()
        if sharded:
            fully_shard(net)
        optimizer = forge.attach(net, lr=1e-4, recipe="sr-store", seed=3)
        for step in range(3):
            net(torch.tensor(0.5 + step, dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(contents(net, optimizer))
    expect_equal(*found, ulps=0)
    assert not torch.equal(found[0]["matrix"], Constant().matrix)


def test_stochastic_rounding_takes_the_bits_of_the_whole_weight(results):  # rows 107 and 108
    results["_stochastic_rounding"]


class Pairs(nn.Module):
    """Column-parallel and row-parallel linears around a replicated norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


@workers
def _tensor_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    found = []
    for ours in (True, False):
        for clip in (None, 0.05):
            net = fully_shard(parallelize_module(Pairs(), mesh["tensor"], plan), mesh=mesh["data"])
            optimizer = attach(net, clip_grad_norm=clip) if ours else torch_adamw(net)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + mesh["data"].get_local_rank())
                net(torch.randn(3, 6, generator=generator)).square().mean().backward()
                if clip is not None and not ours:
                    of_each = [p.grad.full_tensor().norm() for p in net.parameters()]
                    coefficient = torch.clamp(clip / (torch.stack(of_each).norm() + 1e-6), max=1.0)
                    for p in net.parameters():
                        p.grad.mul_(coefficient)
                optimizer.step()
                optimizer.zero_grad()
            found.append(contents(net, optimizer))
    expect_equal(found[0], found[2], ulps=0)
    expect_equal(found[1], found[3], ulps=8)


def test_shards_of_tensor_parallel_weights(results):
    results["_tensor_parallel"]


@workers
def _built_on_the_meta_device():
    found = []
    for ours in (True, False):
        with torch.device("meta"):
            net = Net()
        shard(net)
        net.to_empty(device="cpu")
        whole = Net(seed=3).state_dict()
        net.load_state_dict(
            {name: distribute_tensor(whole[name], p.device_mesh, p.placements) for name, p in net.named_parameters()}
        )
        if ours:
            with pytest.raises(ValueError, match="is on the meta device"), torch.device("meta"):
                attach(shard(Net()))
        optimizer = attach(net) if ours else torch_adamw(net)
        train(net, optimizer)
        found.append(contents(net, optimizer))
    expect_equal(*found, ulps=0)


def test_a_model_built_on_the_meta_device(results):
    results["_built_on_the_meta_device"]


def _odd_shards():
    """A vocabulary and a vector that 3 ranks do not divide."""
    ours, theirs = pair()
    expect_equal(ours, theirs, ulps=0)
    expect_equal(ours, of_one_process(), ulps=8)


def test_rows_that_three_ranks_do_not_divide():  # row 66
    run(3, _odd_shards)
