"""Every rule of regime 1 over several steps, with states in bf16 and with an fp32 master, under attach."""

import copy

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.kernels import reference
from tests.cpu import oracles
from tests.cpu.training import batch, bits_of, expect_bit_equal

LR, STEPS = 1e-3, 4


def attached(form, model, **options):
    name, hyperparameters = form.partition("-")[0], {**oracles.FORMS[form], "weight_decay": 0.1}
    ours = forge.attach(model, name, lr=LR, **hyperparameters, **options)
    return ours, lambda params: oracles.OPTIMIZERS[name](params, lr=LR, foreach=False, **hyperparameters)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("form", oracles.FORMS)
def test_an_fp32_master_is_stepped_as_an_fp32_weight(form, clip):
    torch.manual_seed(0)
    model = nn.Linear(12, 7, bias=False, dtype=torch.bfloat16)
    parameter = nn.Parameter(model.weight.detach().float())
    optimizer, oracle = attached(form, model, recipe="fp32-master", clip_grad_norm=clip)
    oracle = oracle([parameter])
    for step in range(STEPS):
        x, dy = batch(9, 12, seed=step).bfloat16(), batch(9, 7, seed=50 + step).bfloat16()
        model(x).backward(dy)
        parameter.grad = dy.float().t() @ x.float()
        if clip is not None:
            nn.utils.clip_grad_norm_([parameter], clip)
        for each in (optimizer, oracle):
            each.step()
            each.zero_grad()
        state = optimizer.state[model.weight]
        torch.testing.assert_close(state["master"], parameter.detach(), rtol=0, atol=1e-6)
        assert torch.equal(model.weight, state["master"].bfloat16())


@pytest.mark.parametrize("form", [form for form in oracles.FORMS if form != "sgd"])
def test_bf16_states_are_those_of_fp32_rounded_at_each_step(form):
    """The reference's states are rounded to bf16 after each of its steps."""
    torch.manual_seed(0)
    model = nn.Linear(12, 7, bias=False)
    twin = copy.deepcopy(model)
    optimizer, oracle = attached(form, model, recipe="bf16-state")
    oracle = oracle(twin.parameters())
    for step in range(STEPS):
        x, dy = batch(9, 12, seed=step), batch(9, 7, seed=50 + step)
        for each, stepped in ((model, optimizer), (twin, oracle)):
            each(x).backward(dy)
            stepped.step()
            stepped.zero_grad()
        expected = {k: v for k, v in oracle.state[twin.weight].items() if k not in ("step", "mu_product")}
        for name, state in expected.items():
            state.copy_(state.bfloat16())
            got = optimizer.state[model.weight][name]
            assert got.dtype is torch.bfloat16
            # Another order of a sum in fp32 may round to the neighbour.
            ulp = torch.finfo(torch.bfloat16).eps * state.abs()
            assert ((got.float() - state).abs() <= ulp).all(), name
            assert (got.float() == state).float().mean() > 0.9, name
        # A neighbour is 1/128 away, and so may the step be that it makes.
        largest = 7.0 if "nesterov" in form or form == "momentum" else 1.0
        torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=largest * LR / 64 * (step + 1))


@pytest.mark.parametrize("recipe", ["sr-store", "int8", "fp8", "fp32-master", "fp8-weight"])
def test_the_references_blocks_of_rows_leave_the_bits_of_one(recipe, monkeypatch):
    """In which more than 131072 coordinates are stepped; sums of whole numbers are exact in any order."""

    def trained():
        torch.manual_seed(0)
        model = nn.Linear(70, 33, dtype=torch.bfloat16)
        optimizer = forge.attach(model, lr=1e-2, recipe=recipe, seed=5, backend="reference")
        for step in range(3):
            x, dy = (batch(8, extent, seed=10 * step + extent).round().bfloat16() for extent in (70, 33))
            model(x).backward(dy)
            optimizer.step()
            optimizer.zero_grad()
        return bits_of(model, optimizer)

    whole = trained()
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 5 * 70)
    expect_bit_equal(whole, trained())
