"""What the host does for one owned linear in a training step: the operations that it dispatches to torch."""

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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


def operations_of_a_step(linears: int, rule: str = "adamw", **options) -> Counter:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(linears)))
    optimizer = forge.attach(model, rule, lr=1e-3, **options)

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with Dispatched() as dispatched:
        step()
    return dispatched.counts


def operations_of_one_more(rule: str) -> dict[str, float]:
    few, many = operations_of_a_step(8, rule), operations_of_a_step(24, rule)
    return {name: (many[name] - few[name]) / 16 for name in many if many[name] != few[name]}


def test_a_step_of_one_more_linear_dispatches_three_operations():
    """The two products, of which the forward's transposes its weight: 3 where torch's AdamW dispatches 9."""
    assert operations_of_one_more("adamw") == {"aten.t.default": 1, "aten.mm.default": 2}


def test_one_more_matrix_of_muon_dispatches_newton_schulz_besides(monkeypatch):
    """Three products and a view an iteration; the kernel of the epilogue is chosen once."""
    monkeypatch.setattr(fused, "dense_step", lambda *operands: None)
    chosen = []
    monkeypatch.setattr(fused, "launch", lambda *operands: chosen.append(operands) or (lambda *operands: None))
    dispatched = operations_of_one_more("muon")
    products = {"aten.t.default": 1, "aten.mm.default": 2 + 5, "aten.transpose.int": 5, "aten.addmm.default": 10}
    scaled = ("aten._to_copy.default", "aten.linalg_vector_norm.default", "aten.clamp.default", "aten.div.Tensor")
    around = {**dict.fromkeys(scaled, 1), "aten.empty.memory_format": 1, "aten.select.int": 2}
    around |= {"aten.copy_.default": 1, "aten.view.default": 1}
    assert dispatched == products | around
    assert len(chosen) == 8 + 24


def calls_of_a_checkpointed_backward(blocks: int) -> Counter:
    """How often the host enters each Python function in it, each block being a graph task of its own."""
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(blocks))
    optimizer = forge.attach(model, lr=1e-3)
    entered = Counter()

    def count(frame, event, argument):
        if event == "call":
            entered[frame.f_code.co_qualname] += 1

    for _ in range(3):
        entered.clear()
        h = torch.ones(4, 8, requires_grad=True)
        for block in model:
            h = checkpoint(block, h, use_reentrant=True)
        sys.setprofile(count)
        try:
            h.sum().backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    return entered


def test_a_checkpointed_block_costs_the_host_the_same_in_a_deeper_model():
    few, more, most = (calls_of_a_checkpointed_backward(blocks) for blocks in (8, 16, 32))
    deeper = {name for name in most if (most[name] - more[name]) / 16 > (more[name] - few[name]) / 8}
    # The look for a weight that waits or was updated, which an error would name.
    assert deeper <= {"ForgeOptimizer.expect_ready.<locals>.<genexpr>", "Factors.__bool__"}
