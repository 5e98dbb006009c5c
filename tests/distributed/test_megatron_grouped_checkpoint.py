"""Checkpoints of experts in one tensor: on more ranks, with sharded states, and SequentialMLP's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_harness import Case, Run, gap, load, owned_state, run, save
from test_megatron_grouped_experts import GATED, SHARDED, by_expert, grouped

from forge_megatron.formats.noise import random_bits

pytestmark = pytest.mark.timeout(900)

#: Every rank has the same batches: their mean does not depend on how many there are.
BASE = Case(model=GATED, clip=0.05)
ZERO = replace(BASE, optimizer=SHARDED, ddp=SHARDED)


def write(case: Case, folder: str) -> dict:
    session = Run(grouped(case))
    session.train(2)
    save(session, folder)
    found = {"weights": by_expert(session.weights()), "states": states(session)}
    return found | {"next": session.train(2)["losses"]}


def read(case: Case, folder: str) -> dict:
    session = Run(grouped(case), lambda model: [p.data.zero_() for p in model.parameters()])
    load(session, folder)
    found = {"weights": by_expert(session.weights()), "states": states(session)}
    return found | {"next": session.train(2)["losses"]}


def states(session: Run) -> dict[str, torch.Tensor]:
    """First moments; where data-parallel ranks have their rows of them, those alone."""
    owned = {name: state["exp_avg"] for name, state in owned_state(session).items()}
    return by_expert(owned) if session.case.optimizer != SHARDED else {}


@pytest.mark.parametrize("cases", [(BASE, BASE), (BASE, ZERO), (ZERO, BASE)], ids=["whole", "to ZeRO", "from ZeRO"])
def test_two_ranks_experts_are_read_by_four(tmp_path, cases):
    """EP 2 on four ranks, whose data-parallel ranks share states under ZeRO, is read at EP 4 on as many."""
    written = run(4, write, cases[0], str(tmp_path), ep=2, tp=1)
    for rank in run(4, read, cases[1], str(tmp_path), ep=4 if cases[1] is BASE else 2, tp=1):
        for kind in ("weights", "states"):
            whole = {name: value for other in written for name, value in other[kind].items()}
            for name, value in rank[kind].items() if whole else ():
                assert torch.equal(value, whole[name]), (kind, name)
        assert gap(rank["next"], written[0]["next"]) <= 2e-6


def test_two_ranks_experts_are_read_by_one(tmp_path):
    """There, experts and dense weights have one optimizer."""
    written = run(2, write, BASE, str(tmp_path), ep=2, tp=1)
    (rank,) = run(1, read, BASE, str(tmp_path), tp=1)
    for kind in ("weights", "states"):
        assert rank[kind].keys() == written[0][kind].keys() | written[1][kind].keys()
        for other in written:
            for name, value in other[kind].items():
                assert torch.equal(rank[kind][name], value), (kind, name)
    assert gap(rank["next"], written[0]["next"]) <= 2e-6


def weights_of(folder: str) -> list[tuple[dict, dict]]:
    """SequentialMLP's weights read by experts in one tensor, and theirs by SequentialMLP."""
    from megatron.core import dist_checkpointing

    found = []
    for number, (one, other) in enumerate(((BASE, grouped(BASE)), (grouped(BASE), BASE))):
        writer, reader = Run(one), Run(other, lambda model: [p.data.zero_() for p in model.parameters()])
        place = f"{folder}/{number}"
        if torch.distributed.get_rank() == 0:
            Path(place).mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(writer.model.sharded_state_dict(), place)
        reader.model.load_state_dict(dist_checkpointing.load(reader.model.sharded_state_dict(), place))
        found.append((by_expert(writer.weights()), by_expert(reader.weights())))
    return found


def test_weights_are_exchanged_with_sequential_experts(tmp_path):
    for rank in run(2, weights_of, str(tmp_path), ep=2, tp=1):
        for written, read_back in rank:
            assert written.keys() == read_back.keys()
            for name, value in written.items():
                assert torch.equal(read_back[name], value), name


def bits() -> dict[str, torch.Tensor]:
    session = Run(replace(grouped(replace(BASE, dtype=torch.bfloat16)), forge={"recipe": "sr-store", "seed": 11}))
    session.train(1)
    found = {}
    for one in session.optimizer.chained_optimizers:
        for p, name in one.forge.names.items():
            if p.dim() == 3:
                found |= by_expert({name: random_bits(one.forge.random.of(p), 0, p.numel()).view(p.shape)})
    return found


def test_random_bits_do_not_depend_on_which_rank_has_an_expert():
    (whole,) = run(1, bits, tp=1)
    parts = [name for rank in run(2, bits, ep=2, tp=1) for name in rank.items()]
    assert len(whole) == len(parts) == 2 * 2 * 4
    for name, value in parts:
        assert torch.equal(value, whole[name]), name
    assert not torch.equal(
        *(whole[f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight"] for i in (0, 1))
    )
