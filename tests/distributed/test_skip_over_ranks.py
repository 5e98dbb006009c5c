"""One rank's bad gradient is every rank's skipped step: ``reduce_norm_sq``, or the sum itself, is where they meet."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import Workers
from torch import nn
from torch.distributed.fsdp import fully_shard

import forge_megatron as forge

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _reduced(norms_sq):
    total = norms_sq.sum(dtype=torch.float64)
    dist.all_reduce(total)
    return total


def _bypassed(stage, x):
    """``stage(x)``, whose weight is read without its module, and so stepped from ``.grad``."""
    return torch.tanh(nn.functional.linear(x, stage[0].weight, stage[0].bias))


@workers
def _stages():
    return {call.__name__: _two_stages(call) for call in (nn.Module.__call__, _bypassed)}


def _two_stages(call):
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
            y, slope = call(stage, x), torch.empty(3, 6)
            dist.send(y.detach(), 1)
            dist.recv(slope, 1)
            y.backward(slope * (torch.nan if bad else 1.0))
        else:
            dist.recv(x.data, 0)
            call(stage, x).square().sum().backward()
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
        "fused": sum(row.fused for row in optimizer.coverage),
    }


@pytest.mark.parametrize("how", ["fused", "fallback"])
def test_a_stage_that_was_ready_is_not_stepped_when_another_is_bad(results, how):  # field log row 147
    name = _bypassed.__name__ if how == "fallback" else nn.Module.__call__.__name__
    first, last = (found[name] for found in results["_stages"])
    assert first["fused"] == last["fused"] == (how == "fused")
    for found in (first, last):
        assert found["kept"] == [False, True, False]
        assert found["skipped"] == 1
        assert found["steps"] == [2.0, 2.0]
    assert first["norm"] == last["norm"] > 0
    assert first["names"] == [("0.weight", "0.bias")]
    assert last["names"] == [()]


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _held(model, optimizer):
    """This rank's weights, states, scales and step counts, which place the random bits."""
    tensors = [_local(p) for p in model.parameters()]
    tensors += [_local(value) for p in model.parameters() for value in optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in tensors]


def _poisoned(module, inputs, output):
    output.register_hook(lambda grad: grad * torch.nan)


def _data_parallel(
    sharding: str, recipe: str | None, micro_batches: int, clip: float | None, rule: str = "adamw"
) -> dict:
    """The gradient of the first layer is NaN in the last micro-batch of one rank, in the second and the third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = model if recipe is None else model.bfloat16()
    ranks = {}
    if sharding == "full":
        fully_shard(model)
    else:
        ranks = {"process_group": dist.group.WORLD, "sharding": sharding}
    options = {"accumulation_steps": micro_batches, "clip_grad_norm": clip, "recipe": recipe, **ranks}
    optimizer = forge.attach(model, rule, lr=1e-2, skip="atomic", **options)
    kept = []
    for step in range(4):
        before = _held(model, optimizer)
        for micro in range(micro_batches):
            bad = micro == micro_batches - 1 and dist.get_rank() == step - 1
            hook = model[0].register_forward_hook(_poisoned) if bad else None
            model(torch.full((5, 64), 0.1 + micro, dtype=model[0].weight.dtype)).square().mean().backward()
            if hook is not None:
                hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(all(map(torch.equal, before, _held(model, optimizer))))
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return {"kept": kept, "skipped": optimizer.skipped_steps, "steps": steps, "counts": optimizer.skip_counts}


SHARDINGS = {
    "replicas": ("none", None, 1, None),
    "replicas, int8": ("none", "int8", 1, None),
    "replicas, sr-store, accumulated": ("none", "sr-store", 2, None),
    "states, master, accumulated, clipped": ("states", "fp32-master", 3, 0.5),
    "FSDP2, sr-store, accumulated": ("full", "sr-store", 2, None),
    "FSDP2, clipped": ("full", None, 1, 0.5),
    # Its product of momenta is kept on the host.
    "states, nadam": ("states", None, 1, None, "nadam"),
    "FSDP2, nadam": ("full", None, 1, None, "nadam"),
}


@workers
def _shardings() -> dict:
    return {name: _data_parallel(*case) for name, case in SHARDINGS.items()}


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_bad_micro_batch_on_one_data_parallel_rank_skips_all(results, name):
    for rank in results["_shardings"]:
        found = rank[name]
        assert found["kept"] == [False, True, True, False]
        assert found["skipped"] == 2
        assert found["steps"] == {2.0}
        assert found["counts"]["0.weight"] == 2
        assert found["counts"]["4.weight"] == 0
