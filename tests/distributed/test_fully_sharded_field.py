"""Sharded training as it is used: with torch.compile, several optimizers, no_sync, uneven use; and field faults."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from sharded_nets import ADAMW, Net, attach, contents, expect_equal, loss_of, shard, torch_adamw, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.timeout(600)

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@workers
def _no_sync_of_replicated_shards():
    """Four micro-batches, of which only the last is reduced: over the shards, over the replicas, or neither."""
    alone = Net()
    oracle = torch_adamw(alone)
    train(alone, oracle, micro_batches=4, ranks=range(2))
    expected = contents(alone, oracle)
    for shape in ((2, 1), (1, 2)):
        for deferred in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            if shape == (1, 2) and deferred == "set_requires_all_reduce":
                continue
            net = shard(Net(), init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")))
            optimizer = attach(net)
            for step in range(3):
                for micro_batch in range(4):
                    getattr(net, deferred)(micro_batch == 3)
                    (loss_of(net, 10 * step + micro_batch) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
            expect_equal(contents(net, optimizer), expected, ulps=16)
    for options in ({}, {"accumulation_steps": 2}):
        net = shard(Net())
        optimizer = attach(net, **options)
        before = contents(net, optimizer)
        net.set_requires_gradient_sync(False)
        loss_of(net, 0).backward()
        with pytest.raises(RuntimeError, match=r"step\(\), but FSDP2 has not reduced its gradient"):
            optimizer.step()
        optimizer.zero_grad()
        expect_equal(contents(net, optimizer), before, ulps=0)


def test_no_sync_of_replicated_shards(results):  # row 17
    results["_no_sync_of_replicated_shards"]


@workers
def _two_optimizers():
    net, twin = shard(Net()), shard(Net())
    blocks = list(net.blocks.parameters())
    others = [p for p in net.parameters() if not any(p is block for block in blocks)]
    pair = (attach(net, params=blocks), attach(net, params=others, lr=1e-3))
    groups = [
        {"params": list(twin.blocks.parameters())},
        {"params": [p for name, p in twin.named_parameters() if "blocks" not in name], "lr": 1e-3},
    ]
    oracle = torch.optim.AdamW(groups, **ADAMW)
    for step in range(3):
        loss_of(net, step).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(twin, step).backward()
        oracle.step()
        oracle.zero_grad()
    state = {p: value for optimizer in pair for p, value in optimizer.state.items()}
    merged = type("Merged", (), {"state": state})()
    expect_equal(contents(net, merged), contents(twin, oracle), ulps=0)


def test_two_optimizers_of_one_model(results):  # row 97
    results["_two_optimizers"]


@workers
def _state_dict_on_one_rank():
    net = shard(Net())
    optimizer = attach(net)
    train(net, optimizer, steps=1)
    if dist.get_rank() == 0:
        saved = optimizer.state_dict()
        assert saved["state"][0]["exp_avg"].to_local().shape == next(iter(net.parameters())).to_local().shape
    train(net, optimizer, first=1, steps=1)


def test_a_state_dict_on_one_rank_alone(results):  # row 126
    results["_state_dict_on_one_rank"]


class Branching(Net):
    """A block that the last rank does not run."""

    def forward(self, tokens):
        h = self.embedding(tokens) * self.scale.sum()
        h = self.blocks[0](h)
        if self.runs_all:
            h = h + self.branch(h)
        return self.head(self.blocks[1](h))


@workers
def _used_on_some_ranks():
    """Inside a group that all ranks reduce, with zeros where a parameter was not used: the divisor is the world."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return "torch has no set_reduce_scatter_unused_params"
    nets = []
    for sharded in (True, False):
        net = Branching()
        torch.manual_seed(5)
        net.branch = nn.Linear(8, 8)
        nets.append(shard(net) if sharded else net)
    net, alone = nets
    net.set_reduce_scatter_unused_params(True)
    optimizer, oracle = attach(net), torch_adamw(alone)
    for step in range(3):
        net.runs_all = dist.get_rank() == 0
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            alone.runs_all = rank == 0
            (loss_of(alone, step, range(rank, rank + 1)) / 2).backward()
        oracle.step()
        oracle.zero_grad()
    expect_equal(contents(net, optimizer), contents(alone, oracle), ulps=8)
    return "equal"


def test_a_parameter_that_some_ranks_use(results):  # rows 141 and 142
    built = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    assert results["_used_on_some_ranks"] == ["equal" if built else "torch has no set_reduce_scatter_unused_params"] * 2


@workers
def _compiled():
    twin = shard(Net())
    oracle = torch_adamw(twin)
    train(twin, oracle)
    for compiled_first in (False, True):
        net = Net()
        if compiled_first:
            net.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in net.blocks)
        optimizer = attach(shard(net))
        if not compiled_first:
            for block in net.blocks:
                block.compile(backend="aot_eager")
        train(net, optimizer)
        assert not any(p.grad is not None for p in net.parameters())
        found = {name.replace("_orig_mod.", ""): value for name, value in contents(net, optimizer).items()}
        expect_equal(found, contents(twin, oracle), ulps=16)
        assert set(optimizer.names.values()) == {name for name, _ in twin.named_parameters()}


def test_compiled_before_and_after(results):
    results["_compiled"]


@workers
def _broken_backwards():
    """A backward that the second block breaks off, the last of a window; every bit of the steps around it counts."""

    def broken(grad):
        raise KeyboardInterrupt

    def breaks(module, inputs, output):
        output.register_hook(broken)

    def run(options, leave, *, deferred=False):
        net = shard(Net())
        optimizer = attach(net, **options)
        micro_batches = options.get("accumulation_steps", 1)
        for step in range(3):
            if leave is not None and step == 1:
                for micro_batch in range(micro_batches):
                    net.set_requires_gradient_sync(not deferred or micro_batch == micro_batches - 1)
                    last = micro_batch == micro_batches - 1
                    handle = net.blocks[0].register_forward_hook(breaks) if last else None
                    loss = loss_of(net, 50 + micro_batch)
                    try:
                        loss.backward()
                    except KeyboardInterrupt:
                        handle.remove()
                assert leave(optimizer) is not False
                net.set_requires_gradient_sync(True)
            for micro_batch in range(micro_batches):
                loss_of(net, 10 * step + micro_batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return contents(net, optimizer)

    for options in ({"skip": "atomic"}, {"clip_grad_norm": 0.5}, {"accumulation_steps": 2}):
        expected = run(options, None)
        for leave in (lambda o: o.rollback(), lambda o: o.zero_grad()):
            for deferred in (False, True):
                expect_equal(run(options, leave, deferred=deferred), expected, ulps=0)


def test_a_broken_backward_is_rolled_back(results):  # row 139
    results["_broken_backwards"]
