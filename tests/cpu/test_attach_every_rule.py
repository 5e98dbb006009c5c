"""``forge.attach(model, name)`` trains by every rule there is, as its reference does."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.rules import available
from tests.cpu import every_rule


def test_every_rule_has_a_reference():
    assert set(every_rule.OPTIONS) == set(available())


@pytest.mark.parametrize("rule", every_rule.OPTIONS)
def test_trains_and_matches_its_reference(rule):
    every_rule.expect_the_references_steps(rule, "cpu")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("rule", every_rule.OPTIONS)
def test_a_weight_without_rows_or_columns_is_stepped_beside_others(rule):
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 0), nn.Linear(0, 4)])
    optimizer = forge.attach(model, rule, **every_rule.OPTIONS[rule])
    before = model[0].weight.detach().clone()
    sum(linear(torch.ones(2, linear.in_features)).square().sum() for linear in model).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert all(p.isfinite().all() for p in model.parameters())
