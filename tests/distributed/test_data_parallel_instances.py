"""States sharded over some of the data-parallel ranks, with a copy in each such group, against torch's DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import forge_megatron as forge
from tests.distributed.ranks import Workers
from tests.distributed.twins import SMALL, Model, Twins, expect_equal_replicas, loss, weights

workers = Workers()
WORLD = 4


@pytest.fixture(scope="module")
def results():
    return workers.results(WORLD)


def groups(shards: int = 2) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The ranks that have the same rows, and those that share a copy."""
    mesh = init_device_mesh("cpu", (WORLD // shards, shards), mesh_dim_names=("replica", "shard"))
    return mesh.get_group("replica"), mesh.get_group("shard")


def attach(model, shards: int = 2, rule: str = "adamw", **options) -> forge.ForgeOptimizer:
    how = {"process_group": dist.group.WORLD, "sharding": "states", "shard_group": groups(shards)[1]}
    return forge.attach(model, rule, lr=1e-2, **how, **options)


@workers
def as_ddp():
    """Also where a copy has one rank alone, where nothing is sharded, and where there is one copy."""
    small = {"buckets": SMALL}
    ordered = {"buckets": forge.Buckets(deterministic=True)}
    for how in ({}, small, ordered, {"clip": 0.1, **small}, {"micro_batches": 2}, {"clip": 0.02, "each": True}):
        Twins(Model(tied=True), sharding="states", shard_group=groups()[1], **how).train(3).expect_equal()
    for shards in (1, 4):
        for how in ({"clip": 0.1}, ordered):
            Twins(Model(), sharding="states", shard_group=groups(shards)[1], **how).train(2).expect_equal()


@workers
def rules_that_read_a_whole_matrix():
    """They gather it inside a copy, or sum over its ranks: as where all ranks share one."""
    for rule, how in (("lamb", {}), ("adafactor", {}), ("muon", {"adamw": {"lr": 1e-2}})):
        models = [Model() for _ in range(2)]
        for model, shards in zip(models, (2, WORLD), strict=True):
            optimizer = attach(model, shards, rule, **how)
            for number in range(2):
                loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            expect_equal_replicas(model)
        for one, other in zip(*map(weights, models), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@workers
def what_a_rank_holds():
    """Half of the states, the same as the rank with the same half, as the table says; a checkpoint has them once."""
    model = Model().bfloat16()
    optimizer = attach(model, recipe="fp32-master")
    told = optimizer.coverage.state_bytes
    loss(model, 0).backward()
    optimizer.step()
    copies, shard = groups()
    half, held = dist.get_rank() % 2, 0
    for p, state in optimizer.state.items():
        rows = optimizer.held_rows(p)
        assert bool(rows.start) == bool(half)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            value = state[name]
            assert value.shape[0] == rows.stop - rows.start
            held += value.nbytes
            same = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(same, value, group=copies)
            assert torch.equal(*same)
    assert held == told
    total = torch.tensor(held)
    dist.all_reduce(total, group=shard)
    assert total == 3 * sum(4 * p.numel() for p in model.parameters())
    whole, own = optimizer.state_dict(full=True), optimizer.state_dict()
    assert own["forge"]["shard"] == {"rank": half, "of": 2}
    over_all = attach(Model().bfloat16(), WORLD, recipe="fp32-master")
    over_all.load_state_dict(whole)
    for index, entry in over_all.state_dict(full=True)["state"].items():
        assert all(torch.equal(entry[name], whole["state"][index][name]) for name in entry)
    attach(Model().bfloat16(), recipe="fp32-master").load_state_dict(own)


@workers
def other_initial_weights():
    """Every rank of every copy starts from the first rank's."""
    model = Model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())
    attach(model)
    for ours, theirs in zip(model.parameters(), Model().parameters(), strict=True):
        assert torch.equal(ours, theirs)


@workers
def refused():
    one, pair = dist.new_group([0]), groups()[1]
    options = {"lr": 1e-2, "process_group": dist.group.WORLD}
    with pytest.raises(ValueError, match=r"shard_group= with sharding='none'; give sharding='states'"):
        forge.attach(Model(), shard_group=pair, **options)
    with pytest.raises(TypeError, match=r"shard_group=2; give a torch.distributed.ProcessGroup"):
        forge.attach(Model(), sharding="states", shard_group=2, **options)
    with pytest.raises(ValueError, match=r"shard_group= has the ranks \[(0, 1|2, 3)\], which are not"):
        forge.attach(Model(), sharding="states", shard_group=dist.group.WORLD, lr=1e-2, process_group=pair)
    uneven = one if dist.get_rank() == 0 else dist.new_group([1, 2, 3], use_local_synchronization=True)
    with pytest.raises(ValueError, match=r"shard_group=: the ranks \[0, 1, 2, 3\] of .* gave .*\(1, 2, 3\)"):
        forge.attach(Model(), sharding="states", shard_group=uneven, **options)


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_two_copies_on_four_ranks(results, name):
    results[name]
