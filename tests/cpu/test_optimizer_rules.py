"""Rules whose states depend on hyperparameters, and groups that name a rule of their own."""

import copy
import sys

import pytest
import torch
from torch.optim import lr_scheduler

import forge_megatron as forge
from forge_megatron.rules import available, fused
from forge_megatron.rules import rule as rule_module
from tests.cpu import oracles
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_group_has_momentum_and_another_has_not(backend, clip):
    """The rows of hyperparameters have two lengths, and only one group has buffers."""

    def groups(model):
        return [
            {"params": list(model[0].parameters()), "momentum": 0.9, "dampening": 0.5},
            {"params": list(model[2].parameters()), "lr": 2e-2},
            {"params": list(model[4].parameters()), "momentum": 0.8, "nesterov": True},
        ]

    model = mlp(6, 8, 7, 4)
    pair = Pair(
        model, rule="sgd", lr=1e-1, params=groups(model), weight_decay=0.1, maximize=False, backend=backend, clip=clip
    )
    pair.oracle = torch.optim.SGD(groups(pair.twin), lr=1e-1, weight_decay=0.1)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(4)))
    pair.expect_equal()
    names = [set(pair.optimizer.state[model[index].weight]) for index in (0, 2, 4)]
    assert names == [{"step", "momentum_buffer"}, {"step"}, {"step", "momentum_buffer"}]


def two_rules(model, **options):
    """SGD with momentum, and a group of AdamW."""
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "rule": "adamw", "lr": 1e-3, "betas": (0.8, 0.9)},
    ]
    return forge.attach(model, "sgd", groups, lr=1e-2, momentum=0.9, **options)


class Both:
    """Two of torch's optimizers over one model."""

    def __init__(self, model):
        self.sgd = torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9)
        self.adamw = torch.optim.AdamW(model[2].parameters(), lr=1e-3, betas=(0.8, 0.9))
        self.state = {}

    def step(self):
        self.sgd.step(), self.adamw.step()
        self.state = {**self.sgd.state, **self.adamw.state}

    def zero_grad(self):
        self.sgd.zero_grad(), self.adamw.zero_grad()


@backends
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_group_names_another_rule(backend, clip):
    pair = Pair(mlp(6, 8, 4), clip=clip)
    pair.optimizer.detach()
    pair.optimizer = two_rules(pair.model, backend=backend, clip_grad_norm=clip)
    pair.oracle = Both(pair.twin)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(4)))
    pair.expect_equal()
    first, second = pair.optimizer.param_groups
    assert (second["weight_decay"], second["eps"]) == (1e-2, 1e-8)
    assert "betas" not in first
    assert "momentum" not in second


def test_a_checkpoint_keeps_each_groups_rule():
    model = mlp(6, 8, 4)
    optimizer = two_rules(model)

    def train(model, optimizer, seed):
        model(batch(5, 6, seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][1]["rule"] == "adamw"
    other = mlp(6, 8, 4, seed=1)
    other.load_state_dict(model.state_dict())
    restored = two_rules(other)
    restored.load_state_dict(saved)
    train(model, optimizer, 1), train(other, restored, 1)
    expect_bit_equal(snapshot(model, optimizer), snapshot(other, restored))
    plain = forge.attach(mlp(6, 8, 4), "sgd", two_groups_of(mlp(6, 8, 4)), lr=1e-2, momentum=0.9)
    with pytest.raises(ValueError, match="written by rule 'adamw', not 'sgd'"):
        plain.load_state_dict(saved)


def two_groups_of(model):
    return [{"params": list(model[index].named_parameters(f"{index}"))} for index in (0, 2)]


@pytest.mark.parametrize(
    ("group", "error", "match"),
    [
        ({"betas": (0.9, 0.9)}, TypeError, r"gives 'betas', which sgd does not have; it has: lr, momentum"),
        ({"rule": "adamw", "lr": 1e-3, "momentum": 0.9}, TypeError, r"'momentum', which adamw does not have"),
        ({"weight_decy": 0.1}, TypeError, r"gives 'weight_decy', which sgd does not have; it has: lr, momentum"),
        ({"rule": "adamw"}, TypeError, "adamw needs lr="),
        ({"rule": "adamw", "lr": -1.0}, ValueError, r"adamw: lr=-1\.0"),
        ({"rule": "adamz", "lr": 1.0}, ValueError, "no rule 'adamz'"),
    ],
)
def test_a_group_with_a_hyperparameter_that_its_rule_does_not_read(group, error, match):
    model = mlp(6, 8, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=match):
        forge.attach(model, "sgd", [{"params": list(model.parameters()), **group}], lr=1e-2)
    expect_bit_equal(before, [p.detach() for p in model.parameters()])
    # What no rule knows is the user's own.
    forge.attach(model, "sgd", [{"params": list(model.parameters()), "layer_decay": 0.9}], lr=1e-2)


def test_momentum_that_is_switched_on_later_has_no_buffer():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, "sgd", lr=1e-2)
    optimizer.param_groups[0]["momentum"] = 0.9
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"^0\.weight: .* now need the states momentum_buffer, and it has none"):
        model(batch(5, 6)).square().mean().backward()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_checkpoint_with_momentum_is_loaded_where_there_are_buffers():
    pair = Pair(mlp(6, 8, 4), rule="sgd", lr=1e-2, momentum=0.9, dampening=0.3)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(3)))
    # torch's SGD counts no steps; after a load the buffer goes on, and is not begun anew.
    pair.optimizer.load_state_dict(copy.deepcopy(pair.oracle.state_dict()))
    pair.train(mean_square(batch(5, 6, seed=3)))
    pair.expect_equal()
    without = forge.attach(mlp(6, 8, 4), "sgd", lr=1e-2)
    with pytest.raises(ValueError, match="need the states momentum_buffer, and the optimizer has none; attach with"):
        without.load_state_dict(pair.optimizer.state_dict())


def pair_of(form, **options):
    return Pair(mlp(6, 8, 4), rule=form.partition("-")[0], lr=1e-3, weight_decay=0.1, **oracles.FORMS[form], **options)


@pytest.mark.parametrize(("backend", "clip"), [("reference", None), ("reference", 0.05), ("triton", None)])
@pytest.mark.parametrize("form", oracles.FORMS)
def test_every_rule_trains_as_its_reference(form, backend, clip):
    pair = pair_of(form, backend=backend, clip=clip)
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(3)))
    pair.expect_equal()


@pytest.mark.parametrize("form", oracles.FORMS)
def test_every_rule_trains_a_model_with_an_embedding(form):
    """Rows whose tokens do not come are stepped too, with a gradient of 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 4))
    pair = Pair(model, rule=form.partition("-")[0], lr=1e-3, weight_decay=0.1, **oracles.FORMS[form])
    tokens = torch.tensor([[1, 2, 2], [9, 1, 0]])
    pair.train(*(lambda model, shift=shift: model(tokens + shift).square().mean() for shift in (0, 1, 0)))
    pair.expect_equal()


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6, base_momentum=0.6, max_momentum=0.9)


def test_weights_of_one_count_have_each_its_own_product_of_momenta():
    """NAdam, with betas on a schedule, where two weights of a group are stepped in different windows."""
    params, twins = ([torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    optimizer = forge.ForgeOptimizer(params, "nadam", lr=0.1)
    oracle = torch.optim.NAdam(twins, lr=0.1)
    for beta, stepped in ((0.9, [0]), (0.5, [1]), (0.7, [0, 1])):
        for each, weights in ((optimizer, params), (oracle, twins)):
            each.param_groups[0]["betas"] = (beta, 0.999)
            for index in stepped:
                weights[index].grad = torch.tensor([1.0, -2.0, 3.0])
            each.step()
            each.zero_grad()
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=0.0)
    assert optimizer.state[params[0]]["mu_product"] != optimizer.state[params[1]]["mu_product"]


WITHOUT_MOMENTUM = ("sgd", "adagrad", "rmsprop", "rmsprop-centered")


@pytest.mark.parametrize("form", [form for form in oracles.FORMS if form not in WITHOUT_MOMENTUM])
def test_one_cycle_moves_the_momentum_too(form):
    pair = pair_of(form)
    schedules = [one_cycle(optimizer) for _, optimizer in pair.sides()]
    for seed in range(5):
        pair.train(mean_square(batch(5, 6, seed=seed)))
        for schedule in schedules:
            schedule.step()
    pair.expect_equal()


@pytest.mark.parametrize("form", oracles.FORMS)
def test_checkpoints_of_every_rule_both_ways(form):
    pair = pair_of(form)
    for seed in range(3):
        pair.twin(batch(5, 6, seed=seed)).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
    pair.model.load_state_dict(pair.twin.state_dict())
    pair.optimizer.load_state_dict(copy.deepcopy(pair.oracle.state_dict()))
    if form != "lion":
        pair.expect_equal(atol=0)
    pair.train(mean_square(batch(5, 6, seed=3)))
    pair.expect_equal()

    pair.twin = mlp(6, 8, 4)
    pair.twin.load_state_dict(pair.model.state_dict())
    pair.oracle = oracles.OPTIMIZERS[form.partition("-")[0]](pair.twin.parameters(), lr=5.0, **oracles.FORMS[form])
    pair.oracle.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    pair.train(mean_square(batch(5, 6, seed=4)))
    pair.expect_equal()


def test_adagrads_sum_begins_where_it_is_told_to():
    """Also for a parameter that is unfrozen later, and for one that a checkpoint says was never stepped."""
    model = mlp(6, 8, 4)
    model[2].weight.requires_grad_(False)
    optimizer = forge.attach(model, "adagrad", lr=1e-2, initial_accumulator_value=0.5)
    assert (optimizer.state[model[0].weight]["sum"] == 0.5).all()
    model[2].weight.requires_grad_(True)
    model(torch.zeros(5, 6)).sum().mul(0.0).backward()
    optimizer.step()
    assert (optimizer.state[model[2].weight]["sum"] == 0.5).all()

    theirs = torch.optim.Adagrad(model.named_parameters(), lr=1e-2, initial_accumulator_value=0.25)
    saved = theirs.state_dict()
    saved["state"] = {key: state for key, state in saved["state"].items() if key != 0}
    optimizer.load_state_dict(saved)
    assert (optimizer.state[model[0].weight]["sum"] == 0.5).all()
    assert optimizer.state[model[0].weight]["step"] == 0
    assert (optimizer.state[model[2].weight]["sum"] == 0.25).all()


def test_adam_and_adamw_are_not_loaded_from_each_other():
    for rule, theirs, way_out in (("adam", torch.optim.AdamW, "adamw"), ("adamw", torch.optim.Adam, "adam")):
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, rule, lr=1e-3)
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=f"use the rule {way_out}$"):
            optimizer.load_state_dict(theirs(model.parameters(), lr=1e-3).state_dict())
        expect_bit_equal(before, snapshot(model, optimizer))


TOY = '''"""Half of a signed square root, as a test."""

from forge_megatron.rules.bind import torch_language as tl
from forge_megatron.rules.rule import Rule, register


def update(g, w, states, h):
    lr, beta = h
    average = tl.fma(states[0], beta, g)
    root = tl.sqrt(tl.abs(average))
    return w - lr * tl.where(average < 0.0, -root, root), (average,)


register(
    Rule(
        name="toy",
        states=("average",),
        defaults={"beta": 0.5},
        scalars=lambda group, step: (float(group["lr"]), float(group["beta"])),
        update=update,
    )
)
'''


class Toy(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.5):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                average = state["average"] = group["beta"] * state.get("average", 0.0) + p.grad
                state["step"] = state.get("step", 0) + 1
                p.sub_(group["lr"] * average.sign() * average.abs().sqrt())


def test_a_new_rule_is_one_file_of_under_thirty_lines(tmp_path, monkeypatch):
    """Nothing else names it: it is found, trains on every backend, clips, and is saved."""
    assert len(TOY.splitlines()) < 30
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(fused, "__path__", [*fused.__path__, str(tmp_path)])
    # What is registered here is forgotten afterwards.
    monkeypatch.setattr(rule_module, "_registry", dict(rule_module._registry))
    monkeypatch.delitem(sys.modules, f"{fused.__name__}.toy", raising=False)
    assert "toy" in available()
    monkeypatch.setitem(oracles.OPTIMIZERS, "toy", Toy)
    for backend, clip in (("reference", None), ("triton", None), ("triton", 0.05)):
        pair = Pair(mlp(6, 8, 4), rule="toy", lr=1e-3, beta=0.75, backend=backend, clip=clip)
        pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(3)))
        pair.expect_equal(atol=2e-6)
    restored = forge.attach(mlp(6, 8, 4), "toy", lr=1e-3)
    restored.load_state_dict(pair.optimizer.state_dict())
    assert restored.param_groups[0]["beta"] == 0.75
    with pytest.raises(TypeError, match=r"toy has no hyperparameter 'betas'; it has: lr, beta$"):
        forge.attach(mlp(6, 8, 4), "toy", lr=1e-3, betas=(0.9, 0.9))
