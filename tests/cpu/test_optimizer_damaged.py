"""Checkpoints that lack something or hold too much: an error that names it, and nothing has changed."""

import copy
import math

import pytest
import torch

from tests.cpu.training import Pair, batch, expect_bit_equal, mean_square, mlp, snapshot


@pytest.fixture
def trained():
    pair = Pair(mlp(6, 8, 4))
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(3)))
    return pair


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d["state"][0].update(exp_avg=None), r"^0\.weight: the checkpoint has no 'exp_avg'"),
        (lambda d: d["state"][0].update(step=torch.tensor(math.nan)), r"^0\.weight: step is nan"),
        (lambda d: d["state"][0].update(step=-1), r"^0\.weight: step is -1"),
        (
            lambda d: d["state"][0].update(third=torch.zeros(3)),
            r"^0\.weight: the checkpoint has 'third'",
        ),
        (lambda d: d["state"].update({7: d["state"][0]}), "states of 1 parameters that are in none of its groups"),
        (lambda d: d["param_groups"][0]["params"].pop(), "4 names for 3 parameters"),
        (lambda d: d["param_groups"][0].pop("betas"), "a parameter group without 'betas'"),
        (lambda d: d["param_groups"][0].pop("amsgrad"), "a parameter group without 'amsgrad'"),
        (lambda d: (d.pop("forge"), d["param_groups"][0].pop("lr")), "a parameter group without 'lr'"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(trained, damage, said):  # field log row 120
    before = snapshot(trained.model, trained.optimizer)
    saved = copy.deepcopy(trained.optimizer.state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=said):
        trained.optimizer.load_state_dict(saved)
    expect_bit_equal(before, snapshot(trained.model, trained.optimizer))


def test_a_checkpoint_of_an_older_torch_is_loaded(trained):
    """Its groups lack the hyperparameters that came later, and its counts are ints."""
    saved = copy.deepcopy(trained.oracle.state_dict())
    for name in ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
        saved["param_groups"][0].pop(name)
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    trained.model.load_state_dict(trained.twin.state_dict())
    for state in trained.optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    trained.optimizer.load_state_dict(saved)
    trained.expect_equal(atol=0)
    trained.train(mean_square(batch(5, 6, seed=3)))
    trained.expect_equal()
