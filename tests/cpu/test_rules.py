"""The rules against torch.optim and against fp64 written by hand; what they refuse, and by which name."""

import math

import oracles
import pytest
import torch

from forge_megatron.rules import Rule, available, bind, get, register, torch_language

HYPERPARAMETERS = {
    "adamw": [
        {"lr": 1e-3},
        {"lr": 3e-2, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.3},
        {"lr": 1e-2, "betas": (0.0, 0.999), "weight_decay": 0.0},
        {"lr": 1e-2, "maximize": True},
        {"lr": 0.0, "weight_decay": 0.1},
    ],
    "sgd": [
        {"lr": 1e-2},
        {"lr": 1e-1, "weight_decay": 0.2},
        {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    ],
}
CASES = [pytest.param(rule, h, id=f"{rule}-{i}") for rule, hs in HYPERPARAMETERS.items() for i, h in enumerate(hs)]


def run(rule: Rule, hyperparameters, weight, grads):
    """Step ``weight`` through ``grads`` in fp32 by the rule as the reference backend binds it."""
    group = rule.resolve(hyperparameters)
    rule = rule.variant(group)
    update = bind(rule.update, torch_language)
    states = tuple(torch.zeros_like(weight) for _ in rule.states)
    for step, grad in enumerate(grads, start=1):
        scalars = torch.tensor(rule.scalars(group, step), dtype=torch.float32)
        assert scalars.shape == (rule.n_scalars,)
        weight, states = update(grad, weight, states, scalars.unbind())
    return weight, states


def gradients(steps=20, shape=(17, 31)):
    """Gradients whose scale changes along the run: with one scale, a first AdamW step hides any factor."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 2) for step in range(steps)]


@pytest.mark.parametrize(("name", "hyperparameters"), CASES)
def test_twenty_steps_equal_torch_optim(name, hyperparameters):
    grads = gradients()
    weight = torch.randn(17, 31, generator=torch.Generator().manual_seed(0))
    got, states = run(get(name), hyperparameters, weight, grads)

    parameter = torch.nn.Parameter(weight.clone())
    optimizer = oracles.TORCH[name]([parameter], foreach=False, **hyperparameters)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    oracles.assert_rounding(got, parameter.detach(), 8)
    variant = get(name).variant(get(name).resolve(hyperparameters))
    for key, state in zip(variant.states, states, strict=True):
        oracles.assert_rounding(state, optimizer.state[parameter][key], 4)


@pytest.mark.parametrize(("name", "hyperparameters"), CASES)
def test_twenty_steps_equal_fp64(name, hyperparameters):
    grads = gradients()
    weight = torch.randn(17, 31, generator=torch.Generator().manual_seed(0))
    got, states = run(get(name), hyperparameters, weight, grads)

    oracle = oracles.ORACLES[name](**hyperparameters)
    w = weight.double()
    s = tuple(torch.zeros_like(w) for _ in oracle.states)
    for step, grad in enumerate(grads, start=1):
        w, s = oracle.step(w, s, grad.double(), step)
    oracles.assert_rounding(got, w, 8)
    for state, exact in zip(states, s, strict=True):
        oracles.assert_rounding(state, exact, 4)


def test_adamw_decays_before_it_steps_and_adds_eps_after_the_root():
    weight, grads = torch.tensor([1.0]), [torch.tensor([1e-8])]
    got, _ = run(get("adamw"), {"lr": 0.5, "weight_decay": 1.0, "eps": 1e-8}, weight, grads)
    # 1 * (1 - 0.5) - 0.5 * 1e-8 / (1e-8 + 1e-8); eps under the root, or before bias correction, gives another number.
    assert got.item() == pytest.approx(0.25, rel=1e-5)


def test_bias_correction_counts_from_the_first_update():
    group = get("adamw").resolve({"lr": 1.0})
    first, thousandth = get("adamw").scalars(group, 1), get("adamw").scalars(group, 1000)
    assert first[4] == pytest.approx(1.0 / (1 - 0.9))
    assert thousandth[4] == pytest.approx(1.0 / (1 - 0.9**1000))
    assert thousandth[5] == pytest.approx(math.sqrt(1 - 0.999**1000))


def test_lr_may_be_a_tensor():
    group = get("adamw").resolve({"lr": torch.tensor(0.25)})
    assert get("adamw").scalars(group, 1)[4] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("adamw", {"lr": 1e-3, "amsgrad": True}, "amsgrad=True"),
        ("adamw", {"lr": -1.0}, r"lr=-1\.0"),
        ("adamw", {"lr": math.nan}, "lr=nan"),
        ("adamw", {"lr": math.inf}, "lr=inf"),
        ("adamw", {"lr": 1e-3, "betas": (0.9, 1.0)}, r"betas\[1\]=1\.0"),
        ("adamw", {"lr": 1e-3, "betas": (-0.1, 0.9)}, r"betas\[0\]=-0\.1"),
        ("adamw", {"lr": 1e-3, "betas": (0.9,)}, r"betas=\(0\.9,\)"),
        ("adamw", {"lr": 1e-3, "eps": -1e-8}, "eps=-1e-08"),
        ("adamw", {"lr": 1e-3, "weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ("sgd", {"lr": 1e-3, "momentum": -0.9}, r"momentum=-0\.9"),
        ("sgd", {"lr": 1e-3, "momentum": 0.9, "dampening": math.nan}, r"dampening=nan"),
        ("sgd", {"lr": 1e-3, "nesterov": True}, r"nesterov=True with momentum=0\.0"),
        ("sgd", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.1, "nesterov": True}, r"nesterov=True .* dampening=0\.1"),
        ("sgd", {"lr": 1e-3, "weight_decay": math.nan}, "weight_decay=nan"),
    ],
)
def test_a_refused_value_is_named(name, hyperparameters, message):
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        get(name).resolve(hyperparameters)


def test_an_unknown_hyperparameter_is_named_with_those_there_are():
    with pytest.raises(TypeError, match=r"adamw has no hyperparameter 'momentum'.*betas, eps, weight_decay"):
        get("adamw").resolve({"lr": 1e-3, "momentum": 0.9})


def test_lr_has_no_default():
    with pytest.raises(TypeError, match="adamw needs lr="):
        get("adamw").resolve({})


def test_an_unknown_rule_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"no rule 'adam'; there are: adamw, sgd"):
        get("adam")
    assert available() == ["adamw", "sgd"]


def test_a_name_is_registered_once():
    other = Rule("adamw", (), {}, lambda g, s: (), lambda g, w, s, h: (w, s))
    assert register(get("adamw")) is get("adamw")
    with pytest.raises(ValueError, match="'adamw' is already registered"):
        register(other)


def test_defaults_are_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name, optimizer in oracles.TORCH.items():
        theirs = optimizer([parameter], lr=1.0).defaults
        assert {key: theirs[key] for key in get(name).defaults} == dict(get(name).defaults)


def test_adamw_has_the_bits_of_torch_on_the_cpu():
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    parameter = torch.nn.Parameter(weight.clone())
    reference = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, foreach=False)
    rule = get("adamw")
    group = rule.resolve({"lr": 1e-2, "weight_decay": 0.1})
    update = bind(rule.update, torch_language)
    states = (torch.zeros_like(weight), torch.zeros_like(weight))
    for step in range(1, 21):
        parameter.grad = torch.randn(64, 64)
        reference.step()
        weight, states = update(parameter.grad, weight, states, torch.tensor(rule.scalars(group, step)).unbind())
    assert torch.equal(weight, parameter)
    assert torch.equal(states[0], reference.state[parameter]["exp_avg"])
    assert torch.equal(states[1], reference.state[parameter]["exp_avg_sq"])
