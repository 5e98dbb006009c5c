"""Sharded weights and states in torch.distributed.checkpoint: by name, bit for bit, onto another number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run
from sharded_nets import ADAMW, Net, attach, contents, expect_equal, shard, torch_adamw, train
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import forge_megatron as forge

pytestmark = pytest.mark.timeout(600)


def masters(seed: int = 0):
    """bf16 weights with fp32 masters, of which one group has another learning rate."""
    net = shard(Net(seed=seed).bfloat16())
    named = list(net.named_parameters())
    groups = [
        {"params": [p for name, p in named if "blocks" in name], "lr": 1e-3},
        {"params": [p for name, p in named if "blocks" not in name]},
    ]
    return net, forge.attach(net, "adamw", groups, recipe="fp32-master", **ADAMW)


def mixed(seed: int = 0):
    """fp32 weights that are gathered in bf16, one of them frozen."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(Net(seed=seed), mp_policy=policy)
    net.head.bias.requires_grad_(False)
    return net, attach(net)


def rounded(seed: int = 0):
    """bf16 weights that are rounded stochastically: a resumed run goes on with the seed of the checkpoint."""
    net = shard(Net(seed=seed).bfloat16())
    return net, attach(net, weight_store="stochastic", seed=7 + seed)


SETUPS = {"masters": masters, "mixed": mixed, "rounded": rounded}


def load(net, optimizer, folder: str, options: StateDictOptions | None = None) -> None:
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    found = set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    assert not found.missing_keys
    assert not found.unexpected_keys


def _save(folder: str):
    found = {}
    for name, setup in SETUPS.items():
        net, optimizer = setup()
        # As after a failed save that is noticed only at the end of a run: a save before the first step.
        dcp.save({"optimizer": get_state_dict(net, optimizer)[1]}, checkpoint_id=f"{folder}/{name}-0")
        train(net, optimizer, steps=2)
        model_state, optimizer_state = get_state_dict(net, optimizer)
        assert set(optimizer_state["state"]) <= set(model_state)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        found[f"{name} saved"] = contents(net, optimizer)
        train(net, optimizer, first=2, steps=2)
        found[f"{name} straight"] = contents(net, optimizer)

        resumed, optimizer = setup(seed=1)
        load(resumed, optimizer, f"{folder}/{name}")
        expect_equal(contents(resumed, optimizer), found[f"{name} saved"], ulps=0)
        train(resumed, optimizer, first=2, steps=2)
        expect_equal(contents(resumed, optimizer), found[f"{name} straight"], ulps=0)
    return found


def _load(folder: str, saved: dict):
    for name, setup in SETUPS.items():
        net, optimizer = setup(seed=1)
        train(net, optimizer, steps=1)
        load(net, optimizer, f"{folder}/{name}")
        expect_equal(contents(net, optimizer), saved[f"{name} saved"], ulps=0)
        assert [group["lr"] for group in optimizer.param_groups] == ([1e-3, 1e-2] if name == "masters" else [1e-2])
    # Without padding: a process that shards nothing reads the whole tensors.
    flat = {"optimizer": {"state": {"head.weight": {"exp_avg": torch.empty(11, 8)}}}}
    dcp.load(flat, checkpoint_id=f"{folder}/masters")
    saved_average = saved["masters saved"]["head.weight exp_avg"]
    assert torch.equal(flat["optimizer"]["state"]["head.weight"]["exp_avg"], saved_average)


def test_a_checkpoint_is_resumed_bit_for_bit_and_by_half_the_ranks(tmp_path):  # rows 66, 122, 124 and 130
    saved = run(4, _save, str(tmp_path))[0]
    for world in (2, 3):
        run(world, _load, str(tmp_path), saved)


def _from_torch(folder: str):
    """A whole checkpoint of torch.optim, from a run in one process, and its shards."""
    alone = Net()
    oracle = torch_adamw(alone)
    train(alone, oracle, steps=2, ranks=range(2))
    net = shard(Net())
    net.load_state_dict({name: _as(p, alone.get_parameter(name)) for name, p in net.named_parameters()}, strict=True)
    optimizer = attach(net)
    optimizer.load_state_dict(oracle.state_dict())
    expect_equal(contents(net, optimizer), contents(alone, oracle), ulps=0)
    # And back: torch's optimizer on the same shards reads what is saved here.
    twin = shard(Net())
    twin.load_state_dict(net.state_dict())
    oracle = torch_adamw(twin)
    oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch keeps the tensors that it is given
    for model, stepper in ((net, optimizer), (twin, oracle)):
        train(model, stepper, first=2, steps=2)
    expect_equal(contents(net, optimizer), contents(twin, oracle), ulps=0)
    # A whole state dict, gathered and loaded again.
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    other = shard(Net(seed=1))
    stepper = attach(other)
    set_state_dict(other, stepper, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    expect_equal(contents(other, stepper), contents(net, optimizer), ulps=0)


def _as(p, whole):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.detach(), p.device_mesh, p.placements)


def test_torch_optims_whole_checkpoint_and_back(tmp_path):
    run(2, _from_torch, str(tmp_path))
