"""A Megatron GPT on data-parallel ranks with FORGE, against Megatron's own optimizer on the same ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, load, poison, run, save, train_both
from megatron_pairs import expect_bit_equal, expect_equal

pytestmark = pytest.mark.timeout(900)

BASE = Case(steps=4, own_batches=True)
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches, fused head, tied": replace(BASE, micro_batches=2, tied=True, fused_head=True),
    "in backward, fused head": replace(BASE, clip=0.0, fused_head=True),
    "per-token loss": replace(BASE, micro_batches=2, model={"calculate_per_token_loss": True}),
    "overlap": replace(BASE, clip=0.0, ddp={"overlap_grad_reduce": True, "bucket_size": 256}),
    "average in the collective": replace(BASE, clip=0.0, ddp={"average_in_collective": True}),
}


def _all(names: list[str]) -> dict:
    return {name: train_both(CASES[name]) for name in names}


def test_trains_like_megatron():
    names = list(CASES)
    pairs = run(2, _all, names, tp=1)
    expect_equal(pairs, names)
    expect_bit_equal(*pairs, names)


def test_beside_tensor_and_sequence_parallelism():
    names = ["in backward", "micro-batches, fused head, tied"]
    pairs = run(4, _sequence_parallel, names, tp=2)
    expect_equal(pairs, names)
    for shard in (0, 1):
        expect_bit_equal(pairs[shard], pairs[shard + 2], names)


def _sequence_parallel(names: list[str]) -> dict:
    return {name: train_both(replace(CASES[name], sequence_parallel=True)) for name in names}


def _state(session: Run) -> dict[str, torch.Tensor]:
    forge = session.optimizer.chained_optimizers[0].forge
    named = {f"{name}.{key}": value for p, name in forge.names.items() for key, value in forge.state[p].items()}
    return {name: value.clone() for name, value in (session.weights() | named).items()}


def _skipped() -> tuple[dict, dict, bool]:
    """A gradient that is not finite, on the second rank alone."""
    session = Run(replace(CASES["clipped"], clip=1.0).with_forge())
    session.train(1)
    before = _state(session)
    session.backward()
    if dist.get_rank() == 1:
        poison(session, float("nan"))
    stepped, _ = session.step()
    return before, _state(session), stepped


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    for before, after, stepped in run(2, _skipped, tp=1):
        assert not stepped
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), name


def _resumed(folder: str) -> tuple[dict, dict]:
    case = CASES["in backward"].with_forge()
    whole = Run(case)
    whole.train(2)
    save(whole, folder)
    batches = whole.generator.get_state()
    whole.train(2)
    other = Run(case)
    load(other, folder)
    other.generator.set_state(batches)  # the checkpoint has the first rank's
    other.train(2)
    return _state(whole), _state(other)


def test_a_resumed_run_is_bit_equal(tmp_path):
    for whole, resumed in run(2, _resumed, str(tmp_path), tp=1):
        for name, value in whole.items():
            assert torch.equal(value, resumed[name]), name
