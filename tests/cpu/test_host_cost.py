"""What the host does for one owned linear in a training step: the operations that it dispatches to torch."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import forge_megatron as forge
from forge_megatron.kernels import fused


class Dispatched(TorchDispatchMode):
    """Counts the operations that reach torch's kernels inside it."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def without_launches(monkeypatch):
    """On a CPU the reference would run where a GPU has one launch."""
    monkeypatch.setattr(fused, "launch", lambda *operands: lambda *operands: None)


def operations_of_a_step(linears: int, **options) -> Counter:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(linears)))
    optimizer = forge.attach(model, "adamw", lr=1e-3, **options)

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with Dispatched() as dispatched:
        step()
    return dispatched.counts


def test_a_step_of_one_more_linear_dispatches_three_operations():
    """The two products, of which the forward's transposes its weight: 3 where torch's AdamW dispatches 9."""
    few, many = operations_of_a_step(8), operations_of_a_step(24)
    assert {name: (many[name] - few[name]) / 16 for name in many if many[name] != few[name]} == {
        "aten.t.default": 1,
        "aten.mm.default": 2,
    }
