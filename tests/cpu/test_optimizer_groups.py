"""One ordinary torch optimizer: groups, schedulers, closures, hooks."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def grouped(model):
    """Two groups with their own learning rate and decay."""
    return [
        {"params": list(model[0].parameters()), "lr": 2e-2, "weight_decay": 0.1},
        {"params": list(model[2].parameters()), "betas": (0.5, 0.9), "eps": 1e-6},
    ]


def pair_of_groups(**options):
    model = mlp(6, 8, 4)
    pair = Pair(model, lr=1e-3, params=grouped(model), **options)
    pair.oracle = torch.optim.AdamW(grouped(pair.twin), lr=1e-3)
    return pair


@backends
def test_groups_have_their_own_hyperparameters(backend):
    pair = pair_of_groups(backend=backend)
    for seed in range(4):
        pair.train(mean_square(batch(5, 6, seed=seed)))
    pair.expect_equal(atol=2e-6)
    assert [group["lr"] for group in pair.optimizer.param_groups] == [2e-2, 1e-3]
    assert pair.optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias"]


@backends
def test_it_is_a_torch_optimizer_and_warmup_reaches_the_first_update(backend):  # field log row 92
    pair = Pair(mlp(6, 8, 4), lr=1e-2, backend=backend)
    assert isinstance(pair.optimizer, torch.optim.Optimizer)
    schedules = [lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)) for _, o in pair.sides()]
    x = batch(5, 6)
    before = pair.model[0].weight.detach().clone()
    pair.train(mean_square(x))
    # The first AdamW step moves every coordinate by the learning rate, but for decay and eps.
    moved = (pair.model[0].weight.detach() - before * (1 - 1e-2 / 3 * 1e-2)).abs()
    assert (moved - 1e-2 / 3).abs().max() < 1e-5
    for schedule in schedules:
        schedule.step()
    for _ in range(3):
        pair.train(mean_square(x))
        for schedule in schedules:
            schedule.step()
    pair.expect_equal(atol=2e-6)


@backends
def test_a_scheduler_scales_every_groups_own_rate(backend):  # field log row 90
    model = mlp(6, 8, 4)
    groups = [{"params": model[0].parameters(), "lr": 2e-2}, {"params": model[2].parameters(), "lr": 1e-5}]
    optimizer = forge.attach(model, params=groups, lr=1.0, backend=backend)
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-6]
    old = [model[0].weight.detach().clone(), model[2].weight.detach().clone()]
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    for weight, before, lr in zip((model[0].weight, model[2].weight), old, (1e-2, 5e-6), strict=True):
        moved = (weight.detach() - before * (1 - lr * 1e-2)).abs().max().item()
        assert abs(moved - lr) <= 1e-3 * lr + 1e-7


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=6),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9),
        lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2, cycle_momentum=True),
    ],
    ids=["LambdaLR", "OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau", "CyclicLR"],
)
def test_torchs_schedulers_drive_it(schedule):  # field log row 91
    """OneCycleLR and CyclicLR move the betas too."""
    pair = Pair(mlp(6, 8, 4))
    schedules = [schedule(optimizer) for _, optimizer in pair.sides()]
    for seed in range(5):
        pair.train(mean_square(batch(5, 6, seed=seed)))
        for each in schedules:
            each.step(*([1.0] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))
    pair.expect_equal(atol=3e-6)
    assert pair.optimizer.param_groups[0]["lr"] == pair.oracle.param_groups[0]["lr"] != 1e-3


@backends
def test_a_learning_rate_of_zero_stops_the_next_backward(backend):  # field log row 91
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    for group in optimizer.param_groups:
        group["lr"] = 0
    before = [p.detach().clone() for p in model.parameters()]
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    expect_bit_equal(before, [p.detach() for p in model.parameters()])


@backends
def test_a_rate_that_changes_between_backward_and_step(backend):
    """Immediate mode has used the old one: refused, not half applied. Waiting uses the new one, as torch does."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 5e-3
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"a hyperparameter .* changed after backward had updated 0\.weight"):
        optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    for step in range(3):
        pair.backward(mean_square(batch(5, 6, seed=step)))
        for _, optimizer in pair.sides():
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        pair.close()
    pair.expect_equal()


@backends
def test_a_rate_that_changes_between_asking_for_norms_and_step(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True)
    pair.backward(mean_square(batch(5, 6)))
    pair.optimizer.norms_sq()
    for _, optimizer in pair.sides():
        optimizer.param_groups[0]["lr"] = 5e-4
    pair.close()
    pair.expect_equal()


@backends
def test_a_learning_rate_that_is_a_tensor(backend):
    pair = Pair(mlp(6, 8, 4), lr=torch.tensor(1e-3), backend=backend)
    schedules = [lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for _, optimizer in pair.sides()]
    for seed in range(3):
        pair.train(mean_square(batch(5, 6, seed=seed)))
        for schedule in schedules:
            schedule.step()
    pair.expect_equal()
    assert isinstance(pair.optimizer.param_groups[0]["lr"], torch.Tensor)


@backends
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=["immediate", "clipped"])
def test_a_closure(backend, options):
    model, twin = mlp(6, 8, 4), mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, backend=backend, **options)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    x = batch(5, 6)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        oracle.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        if options:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        oracle.step()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_step_and_load_hooks_fire():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "save", "load", "loaded"]


@backends
def test_a_group_that_is_added_later(backend):
    model = mlp(6, 8, 4)
    pair = Pair(model, params=model[0].parameters(), backend=backend)
    pair.oracle = torch.optim.AdamW(pair.twin[0].parameters(), lr=1e-3)
    x = batch(5, 6)
    pair.train(mean_square(x))
    for model, optimizer in pair.sides():
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-2})
        for p in model[2].parameters():
            p.grad = None
    assert pair.optimizer.state[pair.model[2].weight]["step"] == 0
    pair.train(mean_square(x), mean_square(x))
    pair.expect_equal(atol=2e-6)


@backends
def test_a_frozen_part_that_is_added_as_a_group_when_it_is_unfrozen(backend):
    model = mlp(6, 8, 4)
    for p in model[0].parameters():
        p.requires_grad_(False)
    pair = Pair(model, backend=backend)
    pair.oracle = torch.optim.AdamW(pair.twin[2].parameters(), lr=1e-3)
    x = batch(5, 6)
    pair.train(mean_square(x))
    for model, optimizer in pair.sides():
        for p in model[0].parameters():
            p.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-2, "weight_decay": 0.1})
    pair.train(mean_square(x), mean_square(x))
    pair.expect_equal(atol=2e-6)
    assert [len(group["params"]) for group in pair.optimizer.param_groups] == [2, 2]
    assert pair.optimizer.param_groups[1]["param_names"] == ["0.weight", "0.bias"]
    assert all(row.fused for row in pair.optimizer.coverage if row.name.endswith("weight"))


@pytest.mark.parametrize("waiting", [None, True])
@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(3))), r"a parameter \[3\] was put in"),
        (lambda groups: groups[0]["params"].pop(0), r"0\.weight was taken out"),
        (lambda groups: groups.pop(), r"2\.weight was taken out"),
        (lambda groups: groups[0]["params"].__setitem__(1, nn.Parameter(torch.ones(8))), r"0\.bias was taken out"),
        (lambda groups: groups[1]["params"].append(groups[0]["params"].pop()), "its groups are others"),
    ],
)
def test_groups_that_were_edited_are_refused_before_anything_has_changed(edit, what, waiting):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, params=grouped(model), waiting=waiting)
    loss = model(batch(5, 6)).square().mean()
    before = [p.detach().clone() for p in model.parameters()]
    edit(optimizer.param_groups)
    with pytest.raises(RuntimeError, match=what):
        optimizer.state_dict()
    if waiting:
        loss.backward()
    with pytest.raises(RuntimeError, match=what):
        optimizer.step() if waiting else loss.backward()
    expect_bit_equal(before, list(model.parameters()))


def test_groups_in_another_list_are_refused():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 1e-1}]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"param_groups was edited.*detach\(\) and attach\(\) again"):
        model(batch(5, 6)).square().mean().backward()
    expect_bit_equal(before, list(model.parameters()))


def test_a_group_is_not_added_while_a_backward_is_pending():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, params=model[0].parameters(), lr=1e-3)
    model(batch(5, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: a backward is pending"):
        optimizer.add_param_group({"params": [("2.weight", model[2].weight)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"lr": -1.0}, ValueError),
        ({"betas": (1.0, 0.9)}, ValueError),
        ({"weight_decay": math.nan}, ValueError),
        ({"decoupled_weight_decay": False}, ValueError),
        ({"clip_grad_norm": 1.0}, TypeError),
        ({"skip": "atomic"}, TypeError),
    ],
)
def test_a_bad_group_changes_nothing(group, error):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, params=model[0].parameters(), lr=1e-3)
    with pytest.raises(error, match=next(iter(group))):
        optimizer.add_param_group({"params": [("2.weight", model[2].weight)], **group})
    assert len(optimizer.param_groups) == 1
    assert model[2].weight not in optimizer.state
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()


def test_a_parameter_in_two_groups_or_twice_in_one_is_refused():
    model = mlp(6, 8, 4)
    weight = model[0].weight
    with pytest.raises(ValueError, match="more than one parameter group"):
        forge.attach(model, params=[{"params": [weight]}, {"params": [weight]}], lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"0\.weight is given twice"):
            forge.attach(model, params=[weight, weight], lr=1e-3)


@pytest.mark.parametrize("params", [torch.zeros(3), [{"params": {1}}], [], [torch.zeros(3, requires_grad=True) * 2]])
def test_what_torch_optim_refuses_as_params_is_refused(params):
    with pytest.raises((TypeError, ValueError)):
        forge.attach(mlp(6, 4), params=params, lr=1e-3)


def test_decay_groups_leave_vectors_alone():  # field log row 93
    """Matrices are decayed, embeddings among them; biases, norms and other vectors are not."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 6)
            self.norm = nn.LayerNorm(6)
            self.up = nn.Linear(6, 8)
            self.scale = nn.Parameter(torch.ones(8))
            self.down = nn.Linear(8, 6, bias=False)

        def forward(self, ids):
            return self.down(self.up(self.norm(self.embedding(ids))) * self.scale)

    model = Block()
    decayed, kept = forge.decay_groups(model, weight_decay=0.1)
    assert [name for name, _ in decayed["params"]] == ["embedding.weight", "up.weight", "down.weight"]
    assert [name for name, _ in kept["params"]] == ["scale", "norm.weight", "norm.bias", "up.bias"]
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    optimizer = forge.attach(model, params=[decayed, kept], lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model(torch.tensor([[1, 2]])) * 0).sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 1e-2 * 0.1 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=0, atol=1e-7)


def test_decay_groups_of_a_model_without_vectors():
    model = mlp(6, 8, 4, bias=False)
    optimizer = forge.attach(model, params=forge.decay_groups(model, weight_decay=0.1), lr=1e-2)
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())
