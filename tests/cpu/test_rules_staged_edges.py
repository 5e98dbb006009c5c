"""Rules in stages at their edges: norms of 0, an eps that is all that is left, what is not finite, and projections."""

import math

import pytest
import torch

import forge_megatron as forge
from forge_megatron.optimizer import ForgeOptimizer
from forge_megatron.rules import Rule, Stages, rule
from forge_megatron.rules.stages import STEP_DECAYED, STORE_GRADIENT
from tests.cpu.test_rules_staged import train


@pytest.mark.parametrize("name", ["lamb", "lars"])
@pytest.mark.parametrize(("weight", "moves"), [(0.0, True), (1.0, False)])
def test_a_norm_of_0_gives_a_trust_ratio_of_1(name, weight, moves):
    """Of a weight that begins at 0, which a ratio of 0 would keep there, and of an update that is 0."""
    p = torch.nn.Parameter(torch.full((3, 4), weight))
    optimizer = ForgeOptimizer([p], name, lr=0.25, weight_decay=0.0)
    train(optimizer, [p], [torch.full((3, 4), 2.0 if moves else 0.0)])
    first = {"lamb": 1.0, "lars": 2.0}[name]  # Adam's first step is of the gradient's sign.
    torch.testing.assert_close(p.detach(), torch.full((3, 4), weight - 0.25 * first * moves), rtol=1e-5, atol=0.0)


def test_lars_goes_on_by_its_momentum_where_the_gradient_is_0():
    p = torch.nn.Parameter(torch.full((3, 4), 1.0))
    optimizer = ForgeOptimizer([p], "lars", lr=0.5, momentum=0.5, trust_coefficient=0.25)
    for gradient in (4.0, 0.0):
        train(optimizer, [p], [torch.full((3, 4), gradient)])
    # B is 0.25 |w| / |G| G, a quarter, and then half of it.
    torch.testing.assert_close(p.detach(), torch.full((3, 4), 1.0 - 0.5 * 0.25 - 0.5 * 0.125))


def test_scions_rms_of_a_small_vector_has_an_eps():
    p = torch.nn.Parameter(torch.zeros(4))
    train(ForgeOptimizer([p], "scion", lr=1.0, momentum=1.0), [p], [torch.full((4,), 1e-8)])
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.5))


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16-state", torch.bfloat16), ("fp32-master", torch.float32)])
def test_adafactors_first_eps_is_that_of_the_dtype_that_is_stepped(recipe, dtype):
    """Beside gradients that are smaller than bf16's."""
    stepped = []
    for eps1 in (None, torch.finfo(dtype).eps):
        p = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
        optimizer = ForgeOptimizer([p], "adafactor", lr=1.0, eps=(eps1, 1e-3), recipe=recipe)
        train(optimizer, [p], [torch.full((4, 5), 2.0**-10, dtype=torch.bfloat16)])
        stepped.append(p.detach())
    assert torch.equal(*stepped)
    # A square of 2^-20 is above that of fp32's eps, and far below that of bf16's: a step of 2^-10 / 2^-7.
    assert stepped[0].unique().item() == {torch.bfloat16: 0.875, torch.float32: 0.0}[dtype]


@pytest.mark.parametrize("name", ["galore", "apollo", "apollo_mini"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_vector_of_a_low_rank_rule_is_left_alone_whole_where_one_entry_is_not_finite(name, value):
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = ForgeOptimizer([p], name, lr=0.1, weight_decay=0.1)
    train(optimizer, [p], [torch.ones(5)])
    before = [p.detach().clone(), *(optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq"))]
    train(optimizer, [p], [torch.tensor([1.0, value, 1.0, 1.0, 1.0])])
    after = [p.detach(), *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq"))]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("rank", [1, 4])
def test_a_random_projection_keeps_lengths_on_average(rank):
    """Entries of variance 1 / rank: APOLLO's step is as long as its inverse is."""
    p = torch.nn.Parameter(torch.zeros(2000, 1000))
    optimizer = ForgeOptimizer([p], "apollo", lr=0.1, rank=rank)
    train(optimizer, [p], [torch.zeros(2000, 1000)])
    entries = optimizer.state[p]["projection"]
    # Five standard deviations of a mean square of as many normal numbers.
    assert abs(entries.square().mean() * rank - 1) < 5 * (2 / entries.numel()) ** 0.5


def test_power_iterations_find_directions_that_are_barely_larger_than_others():
    """Three singular values above many: without iterations a draw of 11 columns mixes in the others."""
    generator = torch.Generator().manual_seed(3)
    vectors, _, covectors = torch.linalg.svd(torch.randn(60, 50, generator=generator), full_matrices=False)
    sizes = torch.cat([torch.tensor([3.0, 2.5, 2.0]), torch.linspace(1.0, 0.8, 47)])
    p = torch.nn.Parameter(torch.zeros(60, 50))
    optimizer = ForgeOptimizer([p], "galore", lr=0.1, rank=3)
    train(optimizer, [p], [vectors @ torch.diag(sizes) @ covectors])
    found = optimizer.state[p]["projection"] @ covectors[:3].t()
    assert torch.linalg.svdvals(found).min() > 0.99


class Copied:
    """What the epilogue leaves is the gradient, and what the matrix stage gives is that: plain descent."""

    RULE = Rule(
        name="copied",
        regime="deferred",
        states=(),
        defaults={},
        scalars=lambda group, step: (1.0, float(group["lr"])),
        stages_for=lambda group: Copied.STAGES,
    )
    STAGES = Stages(STORE_GRADIENT, STEP_DECAYED, direct=lambda u, statistics, h, whole: u)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("clip", "step"), [(None, 2.0), (1.0, 15**-0.5)])
def test_a_matrix_stage_on_the_gradient_itself_sees_it_clipped_and_whole_or_not_at_all(
    monkeypatch, backend, clip, step
):
    monkeypatch.setitem(rule._registry, "copied", Copied.RULE)
    model = torch.nn.Linear(5, 3, bias=False)
    before = model.weight.detach().clone()
    optimizer = forge.attach(model, "copied", lr=1.0, clip_grad_norm=clip, backend=backend)
    for x in (torch.ones(2, 5), torch.tensor([[math.inf, 1.0, 1.0, 1.0, 1.0]])):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.weight.detach(), before - step)
