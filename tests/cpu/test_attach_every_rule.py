"""``forge.attach(model, name)`` trains by every rule there is, as its reference does."""

import pytest

from forge_megatron.rules import available
from tests.cpu import every_rule


def test_every_rule_has_a_reference():
    assert set(every_rule.OPTIONS) == set(available())


@pytest.mark.parametrize("rule", every_rule.OPTIONS)
def test_trains_and_matches_its_reference(rule):
    every_rule.expect_the_references_steps(rule, "cpu")
