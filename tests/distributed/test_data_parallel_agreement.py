"""What must be equal on all ranks of ``process_group=`` or ``fully_shard``, refused before anything has changed."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import forge_megatron as forge
from tests.distributed.ranks import Workers
from tests.distributed.sharded_nets import Net, shard
from tests.distributed.test_data_parallel_windows import Fails
from tests.distributed.twins import Model, expect_equal_replicas, ids, loss, weights

workers = Workers()
BUCKETS = forge.Buckets(timeout=10)
ADAMW = {"lr": 1e-2, "eps": 1e-3}


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def attach(model, **options):
    return forge.attach(model, **{**ADAMW, "process_group": dist.group.WORLD, "buckets": BUCKETS, **options})


def step(model, optimizer, number=0):
    loss(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def differs(what: str):
    return pytest.raises(ValueError, match=rf"{what}: different on the ranks \(rank 0: .*; rank 1: ")


@workers
def parameters_in_another_order():
    """Of equal shapes, so that only their places in marks and buckets tell."""
    one = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    params = list(model.parameters())
    before = weights(model)
    with differs("parameters in order"):
        attach(model, params=params[::-1] if one else params)
    cut = 1 + one
    with differs("members"):
        attach(model, params=[{"params": params[:cut]}, {"params": params[cut:]}])
    assert all(map(torch.equal, before, weights(model)))


@workers
def formats_of_one_group():
    model = Model().bfloat16()
    first, *others = model.parameters()
    groups = [{"params": [first], "recipe": "int8" if dist.get_rank() else "bf16-state"}, {"params": others}]
    with differs("formats"):
        attach(model, params=groups)
    with differs("backend"):
        attach(model, backend="reference" if dist.get_rank() else "auto")


@workers
def a_group_that_joins():
    """As the model's own parameters: the first rank's values, and nothing that differs."""
    one = dist.get_rank() == 1
    model, joined = Model(), nn.Linear(12, 12)
    with torch.no_grad():
        joined.weight.fill_(1.0 + dist.get_rank())
    optimizer = attach(model)
    step(model, optimizer)
    groups = copy.copy(optimizer.param_groups)
    for what, group in (
        ("parameters in order", {"params": [nn.Parameter(torch.zeros(3 + one, 3))]}),
        ("rules", {"params": list(joined.parameters()), "rule": "sgd" if one else "lion", "lr": 1e-3}),
        ("formats", {"params": list(joined.parameters()), "recipe": "int8" if one else "fp32-master"}),
    ):
        with differs(what):
            optimizer.add_param_group(group)
        assert optimizer.param_groups == groups
        assert optimizer.state.keys() == optimizer.names.keys() == set(model.parameters())
        step(model, optimizer, 1)
    optimizer.add_param_group({"params": list(joined.parameters()), "recipe": "fp32-master"})
    assert torch.equal(joined.weight, torch.ones(12, 12))
    for number in range(2):
        joined(model.embedding(ids(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expect_equal_replicas(nn.ModuleList([model, joined]))


@workers
def a_group_that_joins_on_one_rank():
    model = Model()
    optimizer = attach(model)
    before = weights(model)
    with differs("what is called"):
        if dist.get_rank():
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        else:
            loss(model, 0).backward()
            optimizer.step()
    assert all(map(torch.equal, before, weights(model)))


@workers
def hyperparameters_before_backward_has_stepped():
    model = Model()
    optimizer = attach(model)
    before = weights(model)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with differs("hyperparameters"):
        step(model, optimizer)
    assert all(map(torch.equal, before, weights(model)))


@workers
def norms_that_one_rank_asks_for():
    one = dist.get_rank() == 1
    model = Model()
    optimizer = attach(model, waiting=True)
    before = weights(model)
    for clip, what in (
        (lambda: one and optimizer.clip_grad_norm_(0.1), "clip_grad_norm_"),
        (lambda: optimizer.clip_grad_norm_(0.1 + one), "clip_grad_norm_"),
        (lambda: [optimizer.clip_grad_norm_(limit) for limit in (0.5, 0.1 + one)], "clip_grad_norm_"),
    ):
        loss(model, 0).backward()
        with differs(what):
            clip()
            optimizer.step()
        optimizer.zero_grad()
    loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"some ranks have asked for the norm .* ask for it on every rank"):
        optimizer.norms_sq() if one else optimizer.step()
    optimizer.zero_grad()
    loss(model, 0).backward()
    optimizer.norms_sq()
    with differs("gradient_multiplier"):
        optimizer.step(gradient_multiplier=1.0 + one)
    optimizer.zero_grad()
    loss(model, 0).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 + one)
    scaler.scale(torch.ones(()))
    with differs("loss_scale"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    assert all(map(torch.equal, before, weights(model)))
    step(model, optimizer)
    expect_equal_replicas(model)


@workers
def a_checkpoint_that_one_rank_loads():
    for options in ({}, {"sharding": "states"}):
        model = Model()
        optimizer = attach(model, **options)
        saved = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer)
        before = weights(model)
        if dist.get_rank():
            optimizer.load_state_dict(saved)
        with differs("step counts"):
            step(model, optimizer, 1)
        assert all(map(torch.equal, before, weights(model)))


@workers
def whole_states_that_one_rank_has():
    model = Model()
    model.head.weight.requires_grad_(dist.get_rank() == 0)
    optimizer = attach(model, sharding="states")
    with differs("parameters with states"):
        optimizer.state_dict(full=True)


@workers
def options_under_fully_shard():  # field log row 148
    """Shards that are stepped by other rules, or of which some ranks wait for a norm."""
    one = dist.get_rank() == 1
    for what, rule, options in (
        ("rules", "lion" if one else "adamw", {}),
        ("options", "adamw", {"clip_grad_norm": 1.0 if one else None}),
        ("formats", "adamw", {"recipe": "fp32-master" if one else None}),
        ("seed", "adamw", {"seed": int(one)}),
        ("hyperparameters", "adamw", {"lr": 1e-2 * (1 + one)}),
    ):
        net = shard(Net())
        with differs(what):
            forge.attach(net, rule, **{"lr": 1e-2, **options})
    net = shard(Net())
    params = list(net.parameters())
    with differs("parameters in order"):
        forge.attach(net, "adamw", params=params[::-1] if one else params, lr=1e-2)


@workers
def values_of_any_layout():
    """What is not dense is not read beyond its elements, and no dtype is foreign to the transport."""
    numbers = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for buffer in (
        numbers.clone()[:, ::2], numbers.clone().t(), numbers[:1].clone().expand(3, 8), numbers > 0, numbers.bfloat16(),
        numbers.to(torch.int16), numbers.to(torch.float8_e4m3fn), torch.complex(numbers, numbers),
    ):  # fmt: skip
        between = numbers[:, 1::2].clone()
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(numbers[:, ::2])
        model.register_buffer("buffer", buffer)
        attach(model)
        told = [None, None]
        dist.all_gather_object(told, [model.weight.tolist(), buffer.to(torch.complex64).tolist()])
        assert told[0] == told[1], buffer.dtype
        assert torch.equal(numbers[:, 1::2], between)


@workers
def a_rank_that_stops_where_shards_are_summed():
    """No later than the time that the options give, whatever the collective; a rule's own is between two buckets."""
    for rule, what in (("adamw", "a bucket of gradients"), ("lamb", "what a rule reads of a whole weight")):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        options = {"sharding": "states", "buckets": forge.Buckets(timeout=2, nbytes=64)}
        optimizer = forge.attach(layers, rule, **ADAMW, process_group=dist.group.WORLD, **options)
        hidden = torch.ones(2, 4)
        for index, layer in enumerate(layers):
            # Two more are in rank 0's backward then, which steps the buckets before theirs.
            hidden = layer(Fails.apply(hidden) if index == 2 and dist.get_rank() == 1 else hidden)
        start = time.monotonic()
        if dist.get_rank() == 1:
            with pytest.raises(ArithmeticError):
                hidden.sum().backward()
        else:
            with pytest.raises(RuntimeError, match=rf"^{what}: .*within 2 s; without a sign: rank 1\."):
                hidden.sum().backward()
            assert time.monotonic() - start < 9
        dist.barrier()
        del optimizer


@workers
def optimizers_that_ranks_step_in_another_order():
    """Each waits in one optimizer for a rank that waits in the other: that rank is named, and not the network."""
    other = 1 - dist.get_rank()
    models = [Model(), Model()]
    optimizers = [attach(model, waiting=True, buckets=forge.Buckets(timeout=1)) for model in models]
    before = [weights(model) for model in models]
    for model in models:
        loss(model, 0).backward()
    with pytest.raises(RuntimeError, match=rf"without a sign: rank {other}\. .*optimizers in one order"):
        optimizers[other].step()
    for model, held in zip(models, before, strict=True):
        assert all(map(torch.equal, held, weights(model)))
    dist.barrier()


@workers
def rows_that_torchs_functions_save():
    """They keep of a state_dict its states and groups: what does not say whose rows it has is refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = attach(model, sharding="states")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    own = get_optimizer_state_dict(model, optimizer)
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, own)
    set_optimizer_state_dict(model, optimizer, own)
    with pytest.raises(ValueError, match=r"states of rank [01] of 2, and this is rank .*state_dict\(full=True\)"):
        set_optimizer_state_dict(model, optimizer, everywhere[1 - dist.get_rank()])
    for group in own["param_groups"]:
        del group["forge"]
    with pytest.raises(ValueError, match=r"0\.weight: exp_avg is a rank's rows .*state_dict\(full=True\)"):
        set_optimizer_state_dict(model, optimizer, own)


@pytest.mark.parametrize("name", [function.__name__ for function in workers.functions])
def test_on_two_ranks(results, name):
    results[name]
