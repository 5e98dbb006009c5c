"""Hugging Face's Trainer and Accelerate on two ranks, beside torch.optim.AdamW in DistributedDataParallel."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import forge_megatron as forge
from forge_megatron.integrations.accelerate import connect
from tests.cpu.test_huggingface import expect_same_run, gpt2, llama, train
from tests.cpu.training import batch, mlp
from tests.distributed.ranks import run


def _start_anew() -> None:
    """As torchrun would have started this rank; Accelerate keeps its states for the process."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _trainers(make, changes: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for ours in (True, False):
            _start_anew()
            runs.append(train(make(), f"{folder}/{ours}", samples=22, ours=ours, **changes))
        assert all(one.accelerator.num_processes == 2 for one in runs)
        expect_same_run(*runs)
        theirs = [torch.empty_like(p) for p in runs[0].model.parameters()]
        for copy, p in zip(theirs, runs[0].model.parameters(), strict=True):
            dist.broadcast(copy.copy_(p.detach()), 0)
            assert torch.equal(copy, p)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (llama, {"max_grad_norm": 0.0}),
        (llama, {"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_grad_norm": 0.5}),
        (gpt2, {"gradient_checkpointing": True}),
    ],
    ids=["in backward", "clipped and accumulated", "mostly .grad, checkpointed"],
)
def test_a_trainer_on_two_ranks_trains_as_with_torchs_adamw(make, changes):
    run(2, _trainers, make, changes)


def _accelerated(steps: int, clip: float | None) -> None:
    runs = []
    for ours in (True, False):
        _start_anew()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        assert accelerator.num_processes == 2
        model = mlp(8, 16, 4)
        if ours:
            connect(accelerator)
            options = {"waiting": True, "accumulation_steps": None} if clip or steps > 1 else {}
            optimizer = forge.attach(model, lr=1e-2, process_group=dist.group.WORLD, **options)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trained = list(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        norms = []
        for micro in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(4, 8, seed=10 * micro + accelerator.process_index)).square().mean())
                if clip and accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                optimizer.zero_grad()
        runs.append((trained, norms))
    (weights, norms), (others, expected) = runs
    assert norms == pytest.approx(expected, rel=1e-5)
    assert len(norms) == (6 // steps if clip else 0)
    for p, q in zip(weights, others, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("steps", "clip"), [(1, None), (3, 0.1)])
def test_accelerate_on_two_ranks_trains_as_with_torchs_adamw(steps, clip):
    run(2, _accelerated, steps, clip)


def _refused() -> None:
    _start_anew()
    with tempfile.TemporaryDirectory() as folder, pytest.raises(NotImplementedError, match="sharding='states' with a"):
        train(llama(), folder, ours=True, options={"sharding": "states"})


def test_a_trainer_with_sharded_states_is_refused():
    run(2, _refused)
