"""Formats of states: what a load and a group's own format leave of them, and an outlier in a block."""

import copy

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import batch, mean_square, mlp, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_format", ["int8", "fp8", "bf16"])
def test_a_load_keeps_every_dtype_and_every_byte(state_format, dtype):  # field log row 104
    """States of one byte and of two, beside parameters of four bytes and of two."""

    def trained(steps, seed):
        model = mlp(12, 70, 8, seed=seed).to(dtype)
        optimizer = forge.attach(model, lr=1e-3, state_format=state_format)
        for step in range(steps):
            mean_square(batch(6, 12, seed=step).to(dtype))(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    saved, loaded = trained(3, seed=0), trained(0, seed=1)
    loaded.load_state_dict(saved.state_dict())
    stored = {"int8": {torch.int8, torch.uint8}, "fp8": {torch.float8_e4m3fn}, "bf16": {torch.bfloat16}}[state_format]
    for mine, theirs in zip(states(loaded), states(saved), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype is theirs[name].dtype, name
            assert torch.equal(value.reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8)), name
        assert {mine["exp_avg"].dtype, mine["exp_avg_sq"].dtype} <= stored


@pytest.mark.parametrize("state_format", ["int8", "fp8"])
def test_the_states_of_a_scalar_are_converted_there_and_back(state_format):
    """A logit scale beside a matrix: a parameter without dimensions, whose states have one scale."""

    def attached(wanted):
        model = nn.Linear(4, 3)
        model.scale = nn.Parameter(torch.ones(()))
        return model, forge.attach(model, lr=1e-3, state_format=wanted)

    model, optimizer = attached("fp32")
    (model(torch.ones(2, 4)) * model.scale).sum().backward()
    optimizer.step()
    moments = [optimizer.state[model.scale][name].clone() for name in ("exp_avg", "exp_avg_sq")]
    for wanted in (state_format, "fp32"):
        saved = optimizer.state_dict()
        model, optimizer = attached(wanted)
        with pytest.warns(UserWarning, match="states of the checkpoint were converted"):
            optimizer.load_state_dict(saved, convert=True)
    loaded = [optimizer.state[model.scale][name] for name in ("exp_avg", "exp_avg_sq")]
    torch.testing.assert_close(loaded, moments, rtol=0.07, atol=0.0)


def test_a_groups_own_format_is_that_of_its_states():  # field log row 95
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 64), "head": nn.Linear(64, 10, bias=False)})
    groups = [
        {"params": model["embedding"].parameters(), "state_format": "fp32"},
        {"params": model["head"].parameters()},
    ]
    optimizer = forge.attach(model, "adamw", groups, lr=1e-3, state_format="int8")
    model["head"](model["embedding"](torch.arange(10))).square().mean().backward()
    optimizer.step()
    stored = {
        name: (optimizer.state[module.weight]["exp_avg"].dtype, optimizer.state[module.weight]["exp_avg_sq"].dtype)
        for name, module in model.items()
    }
    assert stored == {"embedding": (torch.float32, torch.float32), "head": (torch.int8, torch.uint8)}


@pytest.mark.parametrize("state_format", ["int8", "fp8"])
def test_a_small_second_moment_beside_an_outlier_keeps_its_denominator(state_format):  # field log row 102
    """A second moment of 1 among those of 1e-6, whose update a linear code makes a hundred thousand times larger."""
    linear = nn.Linear(256, 1, bias=False)
    nn.init.zeros_(linear.weight)
    twin = copy.deepcopy(linear)
    hyperparameters = {"lr": 1.0, "weight_decay": 0.0}
    optimizer = forge.attach(linear, "adamw", state_format=state_format, **hyperparameters)
    oracle = torch.optim.AdamW(twin.parameters(), **hyperparameters)
    second = torch.full((1, 256), 1e-6)
    second[0, 7] = 1.0
    oracle.state[twin.weight] = {
        "step": torch.tensor(100.0),
        "exp_avg": torch.full((1, 256), 1e-3),
        "exp_avg_sq": second,
    }
    with pytest.warns(UserWarning, match="converted from float32 to"):
        optimizer.load_state_dict(oracle.state_dict(), convert=True)
    for module, stepping in ((linear, optimizer), (twin, oracle)):
        module(torch.zeros(1, 256)).sum().backward()
        stepping.step()
    # A level of int8 at a thousandth of the largest is 1.7 % of it wide in the root, a code of e4m3 6 %.
    torch.testing.assert_close(linear.weight, twin.weight, rtol=0.07, atol=0.0)
