"""State that somebody replaces: ``state[p][name] = tensor`` as offloading does, ``clear()``, a new mapping."""

import copy
from collections import defaultdict

import pytest
import torch

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def clone(optimizer):
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def half(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] / 2


def clear(optimizer):
    optimizer.state.clear()


def renew(optimizer):
    optimizer.state = defaultdict(dict)


@backends
@pytest.mark.parametrize("waiting", [False, True], ids=["immediate", "waiting"])
@pytest.mark.parametrize("replace", [clone, half, clear, renew])
def test_replaced_state_is_what_the_next_step_reads(replace, waiting, backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=waiting)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(2)))
    for _, optimizer in pair.sides():
        replace(optimizer)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(2, 4)))
    pair.expect_equal()
    ours, theirs = (optimizer.state_dict()["state"] for _, optimizer in pair.sides())
    torch.testing.assert_close(ours[0]["exp_avg"], theirs[0]["exp_avg"], rtol=0, atol=1e-6)


def test_state_that_is_replaced_between_backward_and_step():
    """What was stepped in backward is replaced after its update, the rest before."""
    pair = Pair(mlp(6, 8, 4))
    pair.train(mean_square(batch(5, 6)))
    pair.backward(mean_square(batch(5, 6, seed=1)))
    for _, optimizer in pair.sides():
        clone(optimizer)
    pair.close()
    pair.train(mean_square(batch(5, 6, seed=2)))
    pair.expect_equal()


def test_saved_as_it_was_replaced():
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2)
    mean_square(batch(5, 6))(model).backward()
    optimizer.step()
    optimizer.state.clear()
    saved = optimizer.state_dict()["state"]
    assert all(torch.count_nonzero(value) == 0 for state in saved.values() for value in state.values())
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("exp_avg", torch.zeros(3, 4), r"\[3, 4\] torch\.float32"), ("exp_avg_sq", None, "None"), ("step", "5", "'5'")],
)
def test_what_does_not_fit_is_refused_by_name(name, value, shown):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    before = snapshot(model, optimizer)
    kept = optimizer.state[model[2].weight][name]
    optimizer.state[model[2].weight][name] = value
    with pytest.raises(RuntimeError, match=rf"^2\.weight: optimizer\.state has {shown} in the place of {name}"):
        mean_square(batch(5, 6))(model).backward()
    optimizer.state[model[2].weight][name] = kept
    optimizer.zero_grad()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_master_is_made_anew_from_its_weight():
    model = mlp(6, 4).to(torch.bfloat16)
    optimizer = forge.attach(model, lr=1e-2, recipe="fp32-master")
    x = batch(5, 6).bfloat16()
    mean_square(x)(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model[0].weight.detach().clone()
    optimizer.state.clear()
    optimizer.step()
    assert torch.equal(optimizer.state[model[0].weight]["master"], weight.float())
    assert torch.equal(model[0].weight, weight)


def test_a_schedule_does_not_write_to_the_checkpoint_that_was_loaded():
    """It fills a learning rate that is a tensor in place."""
    optimizer = forge.attach(mlp(6, 8, 4), lr=torch.tensor(1e-2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(1.0)
    assert saved["param_groups"][0]["lr"] == torch.tensor(1e-2)
