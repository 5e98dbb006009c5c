"""Rules in stages where a norm is 0, or an eps is all that is left below a fraction: one step, counted by hand."""

import pytest
import torch

from forge_megatron.optimizer import ForgeOptimizer
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
