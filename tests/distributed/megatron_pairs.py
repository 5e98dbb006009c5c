"""What runs with Megatron's own optimizer and with FORGE, and replicas of a run, must have in common."""

from __future__ import annotations

import pytest
import torch
from megatron_harness import Case, Run, gap

#: Gate MG's bound for fp32.
LOSS = 2e-6


def expect_equal(pairs: list[dict], names: list[str]) -> None:
    """Losses, norms and weights of each rank's two runs, Megatron's own first."""
    for rank in pairs:
        for name in names:
            theirs, ours = rank[name]
            assert gap(theirs["losses"], ours["losses"]) <= LOSS, name
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5), name
            assert ours["weights"].keys() == theirs["weights"].keys()
            for weight, value in theirs["weights"].items():
                torch.testing.assert_close(ours["weights"][weight], value, rtol=0, atol=5e-5)


def expect_equal_experts(pairs: list[dict]) -> None:
    """Of four ranks' runs, those of layouts where two ranks have the same experts: replicas, bit for bit."""
    for name in pairs[0]:
        if name.startswith("experts over"):
            for expert in (0, 1):
                one, other = (pairs[rank][name][1]["weights"] for rank in (expert, expert + 2))
                for weight, value in one.items():
                    assert torch.equal(value, other[weight]), (name, weight)


def expect_bit_equal(one: dict, other: dict, names: list[str]) -> None:
    """Replicas; their own losses differ, as their batches do."""
    for name in names:
        assert one[name][1]["losses"] != other[name][1]["losses"]
        for weight, value in one[name][1]["weights"].items():
            assert torch.equal(value, other[name][1]["weights"][weight]), (name, weight)


def once_and_rerun(case: Case) -> tuple[list[float], list[float]]:
    """Losses of steps, and of steps whose batch Megatron's rerun state machine runs forward and backward twice."""
    once, twice = Run(case), Run(case)
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        losses[0].append(once.backward())
        once.step()
        position = twice.generator.get_state()
        twice.backward()
        twice.generator.set_state(position)
        losses[1].append(twice.backward())
        twice.step()
    return losses
