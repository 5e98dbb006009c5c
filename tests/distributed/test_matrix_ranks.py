"""Rules that read more than one coordinate, on replicas (process_group=) and under fully_shard, against one process."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from sharded_nets import Net, contents, shard, train

import forge_megatron as forge
from launch.bench.arm import Several
from tests.cpu import oracles_staged

pytestmark = pytest.mark.timeout(600)

workers = Workers()
SMALL = forge.Buckets(nbytes=300, count=2)
MUON, ADAMW = {"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-2, "eps": 1e-3}
RULES = {
    "lamb": {"lr": 1e-2, "eps": 1e-3},
    "adafactor": {"lr": 1e-2},
    "adam_mini": {"lr": 1e-2, "eps": 1e-3},
    "sm3": {"lr": 1e-2},
    "muon": {**MUON, "adamw": ADAMW},
}

#: Rules of a projection, which none of their few steps refreshes: their oracles take it from them.
LOW_RANK = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
PROJECTED = {
    "galore": ({"rank": 3}, oracles_staged.Galore64, {}),
    "apollo": ({"rank": 3}, oracles_staged.Apollo64, {}),
    "apollo_mini": ({}, oracles_staged.Apollo64, {"scale": 128.0, "scale_type": "tensor"}),
}


@pytest.fixture(scope="module", params=[2, 4])
def results(request):
    return workers.results(request.param)


@torch.no_grad()
def filled() -> Net:
    """Without weights that are 0, whose trust ratio the formula leaves open."""
    net = Net()
    for p in net.parameters():
        p.add_(0.1 if p.dim() < 2 else 0.0)
    return net


def torch_muon(net: Net) -> Several:
    hidden = [p for name, p in net.named_parameters() if name.endswith(("up.weight", "down.weight"))]
    others = [p for p in net.parameters() if not any(p is other for other in hidden)]
    return Several(torch.optim.Muon(hidden, **MUON), torch.optim.AdamW(others, **ADAMW))


def oracle(rule: str, net: Net):
    """Of torch, of the authors' package, or fp64 by hand, on whole weights and the gradient of all ranks' batches."""
    if rule == "muon":
        return torch_muon(net)
    if rule == "adafactor":
        return torch.optim.Adafactor(net.parameters(), **RULES[rule])
    if rule == "sm3":
        import pytorch_optimizer

        return pytorch_optimizer.SM3(net.parameters(), foreach=False, **RULES[rule])
    make = {"lamb": oracles_staged.Lamb64, "adam_mini": oracles_staged.AdamMini64}[rule]
    return oracles_staged.Optimizer64(net.parameters(), lambda index: make(**RULES[rule]))


@functools.cache
def expected(rule: str) -> dict[str, torch.Tensor]:
    net = filled()
    train(net, oracle(rule, net), ranks=range(dist.get_world_size()))
    return {name: p.detach() for name, p in net.named_parameters()}


def expect(rule: str, found: dict[str, torch.Tensor]) -> None:
    for name, value in expected(rule).items():
        if rule == "muon" and name.endswith(("up.weight", "down.weight")):
            # Newton-Schulz rounds its input to bf16, where another order of a sum can be the next number.
            assert (found[name] - value).norm() <= torch.finfo(torch.bfloat16).eps * value.norm(), name
        else:
            atol = 1e-3 if rule == "muon" else 2e-6
            torch.testing.assert_close(
                found[name], value, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{rule} {n}: {m}"
            )


def expect_projected(rule: str, found: dict[str, torch.Tensor], optimizer) -> None:
    net, (_, make, given) = filled(), PROJECTED[rule]
    chosen = [state.get("projection") for state in map(optimizer.state.get, optimizer.names)]

    def at(index: int):
        projection = None if chosen[index] is None else chosen[index].double()
        return make(**LOW_RANK, **given, projection=projection)

    assert sum(projection is not None for projection in chosen) == 6
    train(net, oracles_staged.Optimizer64(net.parameters(), at), ranks=range(dist.get_world_size()))
    for name, p in net.named_parameters():
        torch.testing.assert_close(
            found[name], p.detach(), rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{rule} {n}: {m}"
        )


def expect_bit_equal(net: Net, optimizer=None) -> None:
    """Weights of the ranks; with an optimizer states and statistics too."""
    states = [] if optimizer is None else optimizer.state.values()
    held = [*net.parameters(), *(v for state in states for v in state.values())]
    flat = torch.cat([value.detach().float().flatten() for value in held])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(everyone[0], other) for other in everyone)


@workers
def replicas():
    for rule, options in RULES.items():
        # Buckets in which every weight would be cut; in backward, and waiting for a norm.
        for further in ({}, {"buckets": SMALL}, {"buckets": SMALL, "clip_grad_norm": 1e6}):
            net = filled()
            optimizer = forge.attach(net, rule, process_group=dist.group.WORLD, **options, **further)
            train(net, optimizer)
            expect(rule, {name: p.detach() for name, p in net.named_parameters()})
            expect_bit_equal(net, optimizer)
    for rule, (options, *_) in PROJECTED.items():
        for further in ({}, {"buckets": SMALL, "clip_grad_norm": 1e6}):
            net = filled()
            optimizer = forge.attach(net, rule, process_group=dist.group.WORLD, **LOW_RANK, **options, **further)
            train(net, optimizer)
            expect_projected(rule, {name: p.detach() for name, p in net.named_parameters()}, optimizer)
            expect_bit_equal(net, optimizer)


def test_replicas_step_whole_matrices_and_stay_bit_equal(results):
    results["replicas"]


@workers
def fully_sharded():
    for rule, options in RULES.items():
        for further in ({}, {"clip_grad_norm": 1e6}):
            net = shard(filled())
            optimizer = forge.attach(net, rule, **options, **further)
            train(net, optimizer)
            expect(rule, contents(net, optimizer))
    for rule, (options, *_) in PROJECTED.items():
        for further in ({}, {"clip_grad_norm": 1e6}):
            net = shard(filled())
            optimizer = forge.attach(net, rule, **LOW_RANK, **options, **further)
            train(net, optimizer)
            expect_projected(rule, contents(net, optimizer), optimizer)


def test_fully_sharded_matrices_are_stepped_as_the_whole(results):
    results["fully_sharded"]


STATES = {"sharding": "states", "buckets": SMALL}


@workers
def sharded_states():
    group = {"process_group": dist.group.WORLD}
    for rule, options in RULES.items():
        # In backward, and waiting for a norm; each matrix in one bucket, whatever its size.
        waits = {**STATES, "clip_grad_norm": 1e6}
        for further in (STATES, waits) if rule in ("lamb", "muon") else (waits,):
            net = filled()
            optimizer = forge.attach(net, rule, **group, **options, **further)
            train(net, optimizer)
            expect(rule, {name: p.detach() for name, p in net.named_parameters()})
            expect_bit_equal(net)
    for rule, (options, *_) in PROJECTED.items():
        net = filled()
        optimizer = forge.attach(net, rule, **group, **LOW_RANK, **options, **STATES)
        train(net, optimizer)
        expect_projected(rule, {name: p.detach() for name, p in net.named_parameters()}, optimizer)


def test_ranks_step_their_rows_as_the_whole_matrix(results):
    results["sharded_states"]


@workers
def checkpoints_of_sharded_states():
    """Whole, or a rank's own, resumed bit for bit; a whole one by a rank that shards nothing."""
    options = {"process_group": dist.group.WORLD, **STATES}
    for rule, recipe in (("adafactor", "bf16-state"), ("lamb", "int8"), ("muon", "fp32-master")):
        settings = {**RULES[rule], "recipe": recipe, "seed": 3}
        net = filled().bfloat16()
        optimizer = forge.attach(net, rule, **settings, **options)
        train(net, optimizer, steps=2)
        weights, own, whole = copy.deepcopy((net.state_dict(), optimizer.state_dict(), optimizer.state_dict(full=True)))
        train(net, optimizer, first=2, steps=2)
        for saved in (own, whole):
            again = filled().bfloat16()
            resumed = forge.attach(again, rule, **settings, **options)
            again.load_state_dict(weights)
            resumed.load_state_dict(saved)
            train(again, resumed, first=2, steps=2)
            assert all(map(torch.equal, again.parameters(), net.parameters())), (rule, recipe)
        alone = filled().bfloat16()
        single = forge.attach(alone, rule, **settings)
        single.load_state_dict(whole)
        for key, entry in single.state_dict()["state"].items():
            assert entry.keys() == whole["state"][key].keys()
            assert all(torch.equal(value.float(), whole["state"][key][name].float()) for name, value in entry.items())
        # Every rank has its rows of a state and a master, and all of a statistic.
        held = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
        assert optimizer.coverage.state_bytes == held
        assert (held < single.coverage.state_bytes) is (rule != "adafactor")


def test_checkpoints_of_sharded_states(results):
    results["checkpoints_of_sharded_states"]
