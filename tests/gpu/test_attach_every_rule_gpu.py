"""``forge.attach(model, name)`` trains on a GPU by every rule there is, as its reference does on the same GPU."""

import pytest

from tests.cpu import every_rule


@pytest.mark.parametrize("recipe", [None, "fp32-master"])
@pytest.mark.parametrize("rule", every_rule.OPTIONS)
def test_trains_and_matches_its_reference(rule, recipe):
    """fp32 weights by the portable kernels, and bf16 ones with a master by those of 16-bit operands."""
    every_rule.expect_the_references_steps(rule, "cuda", recipe)
