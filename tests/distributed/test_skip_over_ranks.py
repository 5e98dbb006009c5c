"""One rank's bad gradient is every rank's skipped step: ``reduce_norm_sq`` is where they meet."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from torch import nn

import forge_megatron as forge

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _reduced(norms_sq):
    total = norms_sq.sum(dtype=torch.float64)
    dist.all_reduce(total)
    return total


@workers
def _stages():
    """A stage of a model on each rank; the later stage's backward is over before the earlier stage's is NaN."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    optimizer = forge.attach(stage, lr=1e-2, skip="atomic", recipe="fp32-master")
    optimizer.reduce_norm_sq = _reduced
    seen, kept = [], []
    optimizer.on_skip(seen.append)
    rank = dist.get_rank()
    for bad in (False, True, False):
        x = torch.ones(3, 6, requires_grad=True)
        if rank == 0:
            y, slope = stage(x), torch.empty(3, 6)
            dist.send(y.detach(), 1)
            dist.recv(slope, 1)
            y.backward(slope * (torch.nan if bad else 1.0))
        else:
            dist.recv(x.data, 0)
            stage(x).square().sum().backward()
            dist.send(x.grad, 0)
        held = {name: p.detach().clone() for name, p in stage.named_parameters()}
        states = copy.deepcopy(dict(enumerate(optimizer.state.values())))
        optimizer.step()
        optimizer.zero_grad()
        same = all(torch.equal(p, held[name]) for name, p in stage.named_parameters())
        same &= all(
            torch.equal(state[key], states[index][key])
            for index, state in enumerate(optimizer.state.values())
            for key in state
        )
        kept.append(same)
    return {
        "kept": kept,
        "skipped": optimizer.skipped_steps,
        "names": [skip.names for skip in seen],
        "norm": float(optimizer.grad_norm),
        "steps": [float(state["step"]) for state in optimizer.state.values()],
    }


def test_a_stage_that_was_ready_is_not_stepped_when_another_is_bad(results):  # field log row 147
    first, last = results["_stages"]
    for found in (first, last):
        assert found["kept"] == [False, True, False]
        assert found["skipped"] == 1
        assert found["steps"] == [2.0, 2.0]
    assert first["norm"] == last["norm"] > 0
    assert first["names"] == [("0.weight", "0.bias")]
    assert last["names"] == [()]
