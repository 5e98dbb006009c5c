"""What gate EP1 guards, broken inside this process; see gate_breaks.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest.mock import patch

import torch

from forge_megatron.linear import Use


def experts_of_one_ranks_mean():
    """Without Megatron's factor on an expert's gradient, which has come from the losses of all ranks."""
    from forge_megatron.linear import FusedStep

    return patch.object(FusedStep, "_multiplier", lambda self, device: torch.ones((), device=device))


def experts_without_tokens_are_left_out():
    deliver = Use.deliver

    def of_some(use, dy, x, **kwargs):
        if len(x):
            deliver(use, dy, x, **kwargs)

    return patch.object(Use, "deliver", of_some)


def tokens_of_the_expert_before():
    from forge_megatron.linear import grouped

    rows = grouped.GroupedRows
    return patch.object(grouped, "GroupedRows", lambda dy, bounds: rows(dy, (bounds - 1).clamp(min=0)))


@contextlib.contextmanager
def norms_of_this_ranks_experts():
    """Unseen by the ranks themselves, which compare what they clip with before the gate could tell."""
    from forge_megatron.megatron import domains
    from forge_megatron.ranks import AcrossRanks

    experts, facts = domains.experts, AcrossRanks.shared_facts
    with (
        patch.object(domains, "experts", lambda: replace(experts(), model_group=domains.dense().model_group)),
        patch.object(AcrossRanks, "shared_facts", lambda self, **_of_the_step: facts(self)),
    ):
        yield
