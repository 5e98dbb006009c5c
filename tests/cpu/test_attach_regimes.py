"""Every rule in stages under ``attach``: the model twice, one attached and one stepped by the rule's reference."""

import copy
import functools

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu import oracles_staged
from tests.cpu.training import batch, expect_bit_equal, mean_square, mlp, snapshot

ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
NEWTON_SCHULZ = ("muon", "scion")

# What attach is given: rates that move weights by far more than a rounding.
OPTIONS = {
    "lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "muon": {"lr": 1e-2, "adamw": ADAMW},
    "scion": {"lr": 1e-2, "adamw": ADAMW},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.1},
    "adalomo": {"lr": 1e-1, "weight_decay": 0.1},
    "adam_mini": {"lr": 1e-2, "block_rows": 1},
    "sm3": {"lr": 1e-2, "momentum": 0.5},
    "lars": {"lr": 5.0, "weight_decay": 0.1},
    "galore": {"lr": 1e-2, "rank": 3, "update_proj_gap": 2},
    "apollo": {"lr": 1e-2, "rank": 3, "update_proj_gap": 2},
    "apollo_mini": {"lr": 1e-3, "update_proj_gap": 2},
}


class Chain:
    """Two of torch's optimizers over one model."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def package(name: str):
    """Of the authors' package, imported by the rules that are judged by it."""
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)


def reference(rule: str, model: nn.Module, ours):
    """The rule's reference for the parameters of ``model``, a twin of what ``ours`` steps."""
    params, options = list(model.parameters()), OPTIONS[rule]
    if rule in NEWTON_SCHULZ:
        matrices, others = ([p for p in params if (p.dim() == 2) is hidden] for hidden in (True, False))
        make = torch.optim.Muon if rule == "muon" else package("SCION")
        return Chain(make(matrices, lr=options["lr"]), torch.optim.AdamW(others, **ADAMW))
    if rule in ("adafactor", "sm3", "lars"):
        return (torch.optim.Adafactor if rule == "adafactor" else package(rule.upper()))(params, **options)
    if rule in ("galore", "apollo", "apollo_mini"):
        given = [p for group in ours.param_groups for p in group["params"]]

        def make(index):
            projection = ours.state[given[index]].get("projection")
            projection = None if projection is None else projection.double()
            if rule == "galore":
                return oracles_staged.Galore64(options["lr"], projection=projection)
            mini = {"scale": 128.0, "scale_type": "tensor"} if rule == "apollo_mini" else {}
            return oracles_staged.Apollo64(options["lr"], projection=projection, **mini)

        return oracles_staged.Optimizer64(params, make)
    by_hand = {
        "lamb": oracles_staged.Lamb64,
        "adalomo": oracles_staged.AdaLomo64,
        "adam_mini": oracles_staged.AdamMini64,
    }
    return oracles_staged.Optimizer64(params, lambda index: by_hand[rule](**options))


def tolerance(rule: str, steps: int) -> float:
    """Two summations of a gradient may put an entry of Newton-Schulz's input on two sides of a bf16 rounding.

    A polar factor's entries are below 1.5 there, and are scaled by at most sqrt(9 / 6). That the stages are
    exact is shown on gradients without rounding, in test_kernel_regimes.py.
    """
    return steps * 1e-2 * 1.5 * 1.5**0.5 * 2 * torch.finfo(torch.bfloat16).eps if rule in NEWTON_SCHULZ else 2e-6


def expect_equal(rule, model, twin, steps):
    for (name, ours), theirs in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        where = functools.partial("{0}: {1}".format, name)
        torch.testing.assert_close(ours, theirs[1], rtol=0, atol=tolerance(rule, steps), msg=where)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("rule", OPTIONS)
def test_five_steps_in_backward_equal_the_reference(rule, backend):
    steps = 5 if backend == "reference" else 2
    model = mlp(6, 9, 5, 4)
    twin, before = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = forge.attach(model, rule, backend=backend, **OPTIONS[rule])
    oracle = reference(rule, twin, optimizer)
    for seed in range(steps):
        loss = mean_square(batch(7, 6, seed=seed))
        loss(model).backward()
        assert model[0].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        # After ours, whose projections it takes.
        loss(twin).backward()
        oracle.step()
        oracle.zero_grad()
    expect_equal(rule, model, twin, steps)
    assert (model[0].weight - before[0].weight).abs().max() > 1e-3


@pytest.mark.parametrize("rule", OPTIONS)
def test_clipped_and_accumulated_windows_equal_the_reference(rule):
    """The updates wait for step(); one multiplier for all weights, and the factors of two micro-batches."""
    model = mlp(6, 9, 5, 4)
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, rule, clip_grad_norm=0.05, accumulation_steps=2, **OPTIONS[rule])
    oracle = reference(rule, twin, optimizer)
    for seed in range(3):
        for half in range(2):
            mean_square(batch(7, 6, seed=2 * seed + half))(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for half in range(2):
            mean_square(batch(7, 6, seed=2 * seed + half))(twin).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        torch.testing.assert_close(optimizer.grad_norm, norm)
        oracle.step()
        oracle.zero_grad()
    expect_equal(rule, model, twin, 3)


@pytest.mark.parametrize("rule", OPTIONS)
def test_a_resumed_run_is_bit_equal(rule):
    """With bf16 weights and states, which load as bf16: field log rows 105 and 116."""

    def run(model, optimizer, seeds):
        for seed in seeds:
            mean_square(batch(7, 6, seed=seed).bfloat16())(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = mlp(6, 9, 5, 4).bfloat16()
    optimizer = forge.attach(model, rule, **OPTIONS[rule])
    run(model, optimizer, range(3))
    again = mlp(6, 9, 5, 4, seed=1).bfloat16()
    resumed = forge.attach(again, rule, **OPTIONS[rule])
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expect_bit_equal(snapshot(model, optimizer), snapshot(again, resumed))
    for each in ((model, optimizer), (again, resumed)):
        run(*each, range(3, 6))
    expect_bit_equal(snapshot(model, optimizer), snapshot(again, resumed))
    momenta = [optimizer.state[model[0].weight].get(name) for name in ("d", "exp_avg", "momentum_buffer")]
    stored = torch.float32 if rule in ("galore", "apollo", "apollo_mini") else torch.bfloat16
    assert {momentum.dtype for momentum in momenta if momentum is not None} <= {stored}


class Language(nn.Module):
    """An embedding, a block with a norm, and a head."""

    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.lm_head = nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.lm_head(x + self.down(self.up(self.norm(x)).tanh()))


@pytest.mark.parametrize("tied", [False, True])
def test_muon_steps_hidden_matrices_and_adamw_the_rest(tied):
    model = Language(tied)
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, "muon", lr=1e-2, adamw={"lr": 3e-3, "betas": (0.8, 0.9)})
    hidden = [twin.up.weight, twin.down.weight]
    others = [p for p in twin.parameters() if all(p is not h for h in hidden)]
    oracle = Chain(torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.9)))
    for seed in range(5):
        ids = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(seed))
        for each, stepper in ((model, optimizer), (twin, oracle)):
            each(ids).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    expect_equal("muon", model, twin, 5)
    names = {name for p, name in optimizer.names.items() if "momentum_buffer" in optimizer.state[p]}
    assert names == {"up.weight", "down.weight"}


def test_adamw_takes_over_a_groups_decay_and_formats():
    model = Language()
    named = dict(model.named_parameters())
    groups = [{"params": list(named.values()), "weight_decay": 0.3, "state_format": "bf16"}]
    optimizer = forge.attach(model, "muon", groups, lr=1e-2, adamw={"lr": 1e-3})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    assert optimizer.state[named["norm.weight"]]["exp_avg"].dtype is torch.bfloat16


def test_a_rule_of_matrices_without_adamw_names_the_parameter_and_the_way_out():
    model = Language()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"norm\.weight: muon steps matrices.*adamw=dict\(lr=\.\.\.\)"):
        forge.attach(model, "muon", lr=1e-2)
    expect_bit_equal(before, list(model.parameters()))
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize(
    ("adamw", "model", "error", "message"),
    [
        ({"betas": (0.9, 0.99)}, Language(), TypeError, "adamw= needs an lr of its own"),
        ({"lr": 1e-3, "momentum": 0.9}, Language(), TypeError, "'momentum'.*adamw does not have"),
        ({"lr": 1e-3}, mlp(4, 3, bias=False), ValueError, "every parameter is a hidden matrix"),
        ({"lr": 1e-3}, nn.Embedding(4, 3), ValueError, "no parameter is a hidden matrix"),
    ],
)
def test_what_adamw_cannot_be(adamw, model, error, message):
    with pytest.raises(error, match=message):
        forge.attach(model, "muon", lr=1e-2, adamw=adamw)


def test_a_schedule_drives_both_rates_and_an_option_may_change_between_steps():
    model = mlp(6, 9, 5)
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, "muon", lr=1e-2, adamw=ADAMW)
    oracle = reference("muon", twin, optimizer)
    for seed, (rate, ns_steps) in enumerate([(1.0, 5), (0.5, 5), (0.1, 3)]):
        groups = [group for each in oracle.optimizers for group in each.param_groups]
        for group in (*optimizer.param_groups, *groups):
            group["lr"] = rate * (1e-2 if "ns_steps" in group else 1e-3)
            if "ns_steps" in group:
                group["ns_steps"] = ns_steps
        for each, stepper in ((model, optimizer), (twin, oracle)):
            mean_square(batch(7, 6, seed=seed))(each).backward()
            stepper.step()
            stepper.zero_grad()
    expect_equal("muon", model, twin, 3)


def test_a_rank_that_needs_other_states_is_an_error_before_anything_changes():
    model = mlp(6, 9, 5)
    optimizer = forge.attach(model, "galore", lr=1e-2, rank=3)
    optimizer.param_groups[0]["rank"] = 2
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"0\.weight: .* now need exp_avg of \[9, 2\], and it is \[9, 3\]"):
        mean_square(batch(7, 6))(model).backward()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_coverage_says_how_a_weight_is_stepped_and_that_a_projection_is_approximate():
    how = {}
    for rule in ("lamb", "sm3", "galore"):
        model = mlp(6, 9)
        how[rule] = forge.attach(model, rule, lr=1e-2).coverage.rows[0].how
    assert how["lamb"] == "fused, then the weight from its whole matrix"
    assert how["sm3"] == "in backward, from one layer's gradient"
    interpreted = forge.attach(mlp(6, 9), "sm3", lr=1e-2, backend="triton").coverage.rows[0].how
    assert interpreted == "in backward, from one layer's gradient, measured while it is formed"
    assert "approximate" in how["galore"]
