"""The rules against torch.optim and against fp64 written by hand; what they refuse, and by which name."""

import math

import oracles
import pytest
import torch

from forge_megatron.rules import Rule, available, bind, get, register, torch_language

#: Besides those of the form: decay on and off, the other direction, a rate of 0, an eps that is seen, betas of 0.
HYPERPARAMETERS = [
    {"lr": 1e-2},
    {"lr": 3e-2, "weight_decay": 0.3},
    {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.0, "weight_decay": 0.1},
    {"lr": 3e-2, "eps": 0.1},
]
BETAS = [{"lr": 3e-2, "betas": (0.5, 0.7), "eps": 1e-3}, {"lr": 1e-2, "betas": (0.0, 0.999), "weight_decay": 0.0}]
FORMS = [form for form in oracles.FORMS if form != "lion"]


def cases(forms):
    return [
        pytest.param(form, {**oracles.FORMS[form], **hyperparameters}, id=f"{form}-{index}")
        for form in forms
        for index, hyperparameters in enumerate(HYPERPARAMETERS + BETAS)
        if hyperparameters.keys() <= get(form.partition("-")[0]).defaults.keys() | {"lr"}
    ]


def run(form: str, hyperparameters, weight, grads, schedule=None):
    """Step ``weight`` through ``grads`` in fp32 by the rule as the reference backend binds it.

    Args:
        schedule: what hyperparameters are at each step, by its number.
    """
    rule = get(form.partition("-")[0])
    group = rule.resolve(hyperparameters)
    variant = rule.variant(group)
    update = bind(variant.update, torch_language)
    initial = {} if variant.initial is None else variant.initial(group)
    states = tuple(torch.full_like(weight, initial.get(name, 0.0)) for name in variant.states)
    running = tuple(variant.running.values())
    for step, grad in enumerate(grads, start=1):
        if schedule is not None:
            group = {**group, **schedule(step)}
        scalars = torch.tensor(variant.scalars(group, step, *running), dtype=torch.float32)
        assert scalars.shape == (variant.n_scalars,)
        if running:
            running = variant.advance(group, step, *running)
        weight, states = update(grad, weight, states, scalars.unbind())
    return weight, dict(zip(variant.states, states, strict=True))


def run_torch(form: str, hyperparameters, weight, grads, schedule=None):
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = oracles.TORCH[form.partition("-")[0]]([parameter], foreach=False, **hyperparameters)
    for step, grad in enumerate(grads, start=1):
        if schedule is not None:
            optimizer.param_groups[0].update(schedule(step))
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def gradients(steps=20, shape=(17, 31)):
    """Gradients whose scale changes along the run: with one scale, a first AdamW step hides any factor."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 2) for step in range(steps)]


def start():
    return torch.randn(17, 31, generator=torch.Generator().manual_seed(0))


def expect_rounding(got, want, roundings=8):
    """Weights to 8 roundings of the largest, states to 4."""
    (weight, states), (expected, expected_states) = got, want
    oracles.assert_rounding(weight, expected, roundings)
    for name, state in states.items():
        oracles.assert_rounding(state, expected_states[name], 4)


@pytest.mark.parametrize(("form", "hyperparameters"), cases(FORMS))
def test_twenty_steps_equal_torch_optim(form, hyperparameters):
    got = run(form, hyperparameters, start(), gradients())
    expect_rounding(got, run_torch(form, hyperparameters, start(), gradients()))


@pytest.mark.parametrize(("form", "hyperparameters"), cases(["adamw", "sgd", "lion"]))
def test_twenty_steps_equal_fp64(form, hyperparameters):
    got = run(form, hyperparameters, start(), gradients())
    oracle = oracles.ORACLES[form](**hyperparameters)
    w = start().double()
    s = tuple(torch.zeros_like(w) for _ in oracle.states)
    for step, grad in enumerate(gradients(), start=1):
        w, s = oracle.step(w, s, grad.double(), step)
    # Lion's steps are all of one size and add up: 20 times two roundings of half a unit.
    expect_rounding(got, (w, dict(zip(oracle.states, s, strict=True))), 20 if form == "lion" else 8)


@pytest.mark.parametrize("form", FORMS)
def test_every_hyperparameter_may_follow_a_schedule(form):
    """As OneCycleLR and its like do: the rate, the decay and the momentum or the betas change at each step."""

    def schedule(step):
        known = {
            "lr": 1e-2 / (1 + step % 4),
            "weight_decay": 0.01 * step,
            "betas": (0.95 - 0.01 * step, 0.9 + 0.002 * step),
            "momentum": 0.95 - 0.01 * step,
            "momentum_decay": 0.004 * (1 + step % 3),
            "lr_decay": 0.01 * (step % 2),
        }
        plain = form in ("sgd", "rmsprop", "rmsprop-centered")
        defaults = get(form.partition("-")[0]).defaults.keys() | {"lr"}
        return {k: v for k, v in known.items() if k in defaults and not (plain and k == "momentum")}

    hyperparameters = {**oracles.FORMS[form], "lr": 1e-2}
    got = run(form, hyperparameters, start(), gradients(), schedule)
    expect_rounding(got, run_torch(form, hyperparameters, start(), gradients(), schedule))


@pytest.mark.parametrize("form", [form for form in FORMS if "eps" in get(form.partition("-")[0]).defaults])
def test_no_eps_and_no_gradient_is_torchs_answer(form):
    """0 / 0 where the second moment is 0, and 0 where it has been something."""
    grads = [torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), torch.zeros(1, 2)]
    hyperparameters = {**oracles.FORMS[form], "lr": 1e-2, "eps": 0.0}
    for steps in (1, 3):
        got, states = run(form, hyperparameters, torch.ones(1, 2), grads[:steps])
        want, expected = run_torch(form, hyperparameters, torch.ones(1, 2), grads[:steps])
        torch.testing.assert_close(got, want, equal_nan=True)
        # Once a weight is NaN, torch still leaves it out of an L2 penalty of 0.
        kept = want.isfinite() if steps > 1 else torch.ones(1, 2, dtype=torch.bool)
        for name, state in states.items():
            torch.testing.assert_close(state[kept], expected[name][kept], equal_nan=True)


def test_the_first_momentum_is_the_gradient_without_dampening():
    grads = [torch.tensor([2.0]), torch.tensor([4.0])]
    _, states = run("momentum", {"lr": 0.1, "momentum": 0.5, "dampening": 0.25}, torch.ones(1), grads[:1])
    assert states["momentum_buffer"] == 2.0
    _, states = run("momentum", {"lr": 0.1, "momentum": 0.5, "dampening": 0.25}, torch.ones(1), grads)
    assert states["momentum_buffer"] == 0.5 * 2.0 + 0.75 * 4.0


def test_radam_is_rectified_once_the_average_is_longer_than_five():
    """With betas of torch's defaults that is from the sixth step; before, the step is that of momentum."""
    rule = get("radam")
    group = rule.resolve({"lr": 1.0})
    assert [rule.scalars(group, step)[-1] for step in range(4, 8)] == [0.0, 0.0, 1.0, 1.0]
    grads = [torch.full((1,), 1e-3)] * 5
    weight, _ = run("radam", {"lr": 1.0}, torch.zeros(1), grads)
    assert weight.item() == pytest.approx(-5e-3, rel=1e-6)
    weight, _ = run("radam", {"lr": 1.0}, torch.zeros(1), [*grads, grads[0]])
    assert weight.item() < -8e-3


def test_lion_steps_by_the_sign_and_not_where_there_is_none():
    weight, states = run(
        "lion",
        {"lr": 0.25, "weight_decay": 1.0},
        torch.tensor([4.0, 4.0, 4.0]),
        [torch.tensor([1e-30, 0.0, -5.0])],
    )
    assert torch.equal(weight, torch.tensor([2.75, 3.0, 3.25]))
    assert states["exp_avg"][1] == 0.0


def test_momentum_is_sgd_with_momentum():
    assert get("momentum").defaults == {**get("sgd").defaults, "momentum": 0.9}
    assert get("momentum").update is get("sgd").update
    assert get("momentum").states == ("momentum_buffer",)


def test_l2_and_decoupled_decay_are_not_mixed_up():
    """Where the gradient is 0, L2 decay moves the moments and decoupled decay only the weight."""
    for form, first in (("adam", 0.01), ("adamw", 0.0), ("nadam", 0.01), ("nadam-decoupled", 0.0), ("lion", 0.0)):
        hyperparameters = {**oracles.FORMS[form], "lr": 1e-2, "weight_decay": 0.1}
        weight, states = run(form, hyperparameters, torch.ones(1), [torch.zeros(1)])
        assert states["exp_avg"].item() == pytest.approx(first, rel=1e-6), form
        assert weight.item() == pytest.approx(0.999 if first == 0.0 else weight.item(), rel=1e-6), form


def test_adamw_decays_before_it_steps_and_adds_eps_after_the_root():
    weight, grads = torch.tensor([1.0]), [torch.tensor([1e-8])]
    got, _ = run("adamw", {"lr": 0.5, "weight_decay": 1.0, "eps": 1e-8}, weight, grads)
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
        ("adamw", {"lr": 1e-3, "decoupled_weight_decay": False}, "decoupled_weight_decay=False .* use the rule adam$"),
        ("adam", {"lr": 1e-3, "decoupled_weight_decay": True}, "decoupled_weight_decay=True .* use the rule adamw$"),
        ("adagrad", {"lr": 1e-3, "lr_decay": -0.1}, r"lr_decay=-0\.1"),
        ("adagrad", {"lr": 1e-3, "initial_accumulator_value": -1.0}, r"initial_accumulator_value=-1\.0"),
        ("rmsprop", {"lr": 1e-3, "alpha": -0.5}, r"alpha=-0\.5"),
        ("rmsprop", {"lr": 1e-3, "alpha": 1.5}, r"alpha=1\.5"),
        ("rmsprop", {"lr": 1e-3, "momentum": -0.5}, r"momentum=-0\.5"),
        ("nadam", {"lr": 1e-3, "momentum_decay": -1.0}, r"momentum_decay=-1\.0"),
        ("lion", {"lr": 1e-3, "betas": (0.9, 1.5)}, r"betas\[1\]=1\.5"),
        ("adamw", {"lr": -1.0}, r"lr=-1\.0"),
        ("adamw", {"lr": math.nan}, "lr=nan"),
        ("adamw", {"lr": None}, "lr=None"),
        ("adamw", {"lr": "1e-3"}, "lr='1e-3'"),
        ("adamw", {"lr": torch.ones(2)}, r"lr=tensor\(\[1\., 1\.\]\)"),
        ("adamw", {"lr": 1e-3, "maximize": torch.ones(2)}, r"maximize=tensor"),
        ("adamw", {"lr": 1e-3, "betas": 0.9}, "betas=0.9"),
        ("adamw", {"lr": 1e-3, "amsgrad": "False"}, "amsgrad='False'"),
        ("adamw", {"lr": 1e-3, "maximize": None}, "maximize=None"),
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
    fused = {form.partition("-")[0] for form in oracles.FORMS}
    with pytest.raises(ValueError, match=r"no rule 'adamz'; there are: .*adam, .*adamw, .*sgd"):
        get("adamz")
    assert fused <= set(available())


def test_a_name_is_registered_once():
    other = Rule("adamw", (), {}, lambda g, s: (), lambda g, w, s, h: (w, s))
    assert register(get("adamw")) is get("adamw")
    with pytest.raises(ValueError, match="'adamw' is already registered"):
        register(other)


def test_defaults_are_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name, optimizer in oracles.TORCH.items():
        theirs = optimizer([parameter], lr=1.0).defaults
        rule = get(name)
        assert {key: theirs[key] for key in rule.defaults} == dict(rule.defaults), name
        # And nothing that torch reads is left out, but for its switches of how.
        assert theirs.keys() - rule.defaults.keys() <= {"lr", "foreach", "capturable", "differentiable", "fused"}, name


# SGD: torch rounds once in a fused multiply-add. RMSprop with momentum: so too.
@pytest.mark.parametrize("form", ["adagrad", "adam", "adam-amsgrad", "adamax", "adamw", "adamw-amsgrad", "rmsprop"])
def test_a_rule_has_the_bits_of_torch_on_the_cpu(form):
    torch.manual_seed(0)
    weight, grads = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(20)]
    hyperparameters = {**oracles.FORMS[form], "lr": 1e-2, "weight_decay": 0.1}
    got, states = run(form, hyperparameters, weight, grads)
    want, expected = run_torch(form, hyperparameters, weight, grads)
    assert torch.equal(got, want)
    for name, state in states.items():
        assert torch.equal(state, expected[name]), name
