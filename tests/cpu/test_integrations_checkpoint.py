"""``torch.distributed.checkpoint`` of an optimizer's states, in the formats that wrote it and in others."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import forge_megatron as forge
from forge_megatron.integrations.checkpoint import LoadPlanner
from tests.cpu.training import batch, expect_bit_equal, mean_square, mlp, snapshot


def trained(seed: int, **options):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, **options)
    mean_square(batch(5, 6, seed=seed))(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(folder, **options):
    model, optimizer = trained(0, **options)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)
    return snapshot(model, optimizer)


def load(folder, model, optimizer):
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize(("wrote", "reads"), [("int8", "bf16"), ("fp8", "fp32"), ("fp8", "int8")])
def test_codes_are_not_read_as_numbers(tmp_path, wrote, reads):
    saved(tmp_path, state_format=wrote)
    model, optimizer = trained(1, state_format=reads)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointException, match=r"exp_avg\S*: torch\.\w+ in the checkpoint, torch\.\w+ here"):
        load(tmp_path, model, optimizer)
    expect_bit_equal(before, snapshot(model, optimizer))


@pytest.mark.parametrize(("wrote", "reads"), [("int8", "int8"), ("bf16", "fp32")])
def test_numbers_and_equal_formats_are_read(tmp_path, wrote, reads):
    before = saved(tmp_path, state_format=wrote)
    model, optimizer = trained(1, state_format=reads)
    load(tmp_path, model, optimizer)
    states = slice(len(model.state_dict()), None)
    expect_bit_equal([t.to(u.dtype) for t, u in zip(before, snapshot(model, optimizer), strict=True)][states],
                     snapshot(model, optimizer)[states])  # fmt: skip


def take(model, optimizer, steps: range) -> None:
    """Steps of two micro-batches each."""
    for step in steps:
        for part in range(2):
            mean_square(batch(16, 32, seed=2 * step + part).bfloat16())(model).backward()
        optimizer.step()
        optimizer.zero_grad()


RESUMED = {
    "bf16 states": {"state_format": "bf16"},
    "int8": {"state_format": "int8"},
    "master": {"weight_store": "master"},
    "rounded stochastically": {"weight_store": "stochastic"},
    # Of unknown length: the window before says whether the first micro-batch is summed up, and so rounded.
    "any length": {"accumulation_steps": None, "accumulation_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_what_torchs_functions_save_is_resumed_bit_for_bit(tmp_path, options):
    """They keep of a state_dict its states and groups; the seed is that of the checkpoint, not of the second attach."""
    options = {"lr": 1e-2, "accumulation_steps": 2, **options}
    model = mlp(32, 64, 32).bfloat16()
    optimizer = forge.attach(model, seed=7, **options)
    take(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    take(model, optimizer, range(2, 4))

    resumed = mlp(32, 64, 32, seed=1).bfloat16()
    other = forge.attach(resumed, **options)
    state = {"model": resumed.state_dict(), "optimizer": get_optimizer_state_dict(resumed, other)}
    dcp.load(state, checkpoint_id=tmp_path, planner=LoadPlanner(), no_dist=True)
    resumed.load_state_dict(state["model"])
    set_optimizer_state_dict(resumed, other, state["optimizer"])
    take(resumed, other, range(2, 4))
    expect_bit_equal(snapshot(model, optimizer), snapshot(resumed, other))


def test_what_torchs_functions_save_is_matched_by_name():
    """Two weights of one shape, whose order in their group differs."""
    model = mlp(6, 6, 6, bias=False)
    named = list(model.named_parameters())
    optimizer = forge.attach(model, "adamw", [{"params": named}], lr=1e-2)
    mean_square(batch(5, 6))(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    twin = mlp(6, 6, 6, bias=False)
    other = forge.attach(twin, "adamw", [{"params": list(twin.named_parameters())[::-1]}], lr=1e-2)
    set_optimizer_state_dict(twin, other, state)
    for (name, ours), theirs in zip(named, twin.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg"], other.state[theirs]["exp_avg"]), name


def test_a_group_that_does_not_say_its_order_is_refused():
    model = mlp(6, 6, 6, bias=False)
    optimizer = forge.attach(model, lr=1e-2)
    state = optimizer.state_dict()
    state["state"] = {f"wrapped.{name}": state["state"][key] for key, name in enumerate(optimizer.names.values())}
    state["param_groups"][0]["params"] = list(state["state"])
    with pytest.raises(ValueError, match=r"wrapped\.0\.weight.*save optimizer\.state_dict\(\) itself"):
        optimizer.load_state_dict(state)
