"""Experts on several ranks in pipeline stages with FORGE: beside Megatron's optimizer, one process, and checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, gap, layout, load, owned_state, run, save, train, train_both
from megatron_pairs import LOSS, expect_equal
from test_megatron_experts import MODEL
from test_megatron_grouped_experts import by_expert, grouped
from test_megatron_pipeline import FREED, OVERLAPPED

pytestmark = pytest.mark.timeout(600)

SHARDED = {"use_distributed_optimizer": True}
BASE = Case(steps=3, layers=4, micro_batches=2, clip=0.05, model=MODEL | FREED)
STAGES = {"tp": 1, "pp": 2, "ep": 2}
# (case, chunks of a stage)
CASES = {
    "tied, clipped": (replace(BASE, tied=True), None),
    "in backward": (replace(BASE, micro_batches=1, clip=0.0), None),
    "distributed optimizer": (replace(BASE, optimizer=SHARDED, ddp=SHARDED), None),
    "interleaved": (replace(BASE, model=MODEL | OVERLAPPED), 2),
}
workers, checkpoint_workers = Workers(), Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(4)


#: Where a checkpoint is written, and read. Stages come last: their ranks are in different numbers of process groups, by
#: which torch names a group that only some ranks make, as FORGE does.
LAYOUTS = {
    "every expert on every rank": {"tp": 1},
    "experts over four ranks": {"tp": 1, "ep": 4},
    "stages": STAGES,
}
CHECKPOINTED = BASE.with_forge()


@checkpoint_workers
def _written() -> dict:
    """What each layout wrote, and read of those before it."""
    found, shared = {}, [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    for writer, degrees in LAYOUTS.items():
        folder = f"{shared[0]}/{writer}"
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        with layout(**degrees):
            session = Run(CHECKPOINTED)
            session.train(2)
            save(session, folder)
            found[writer] = folder, owned_state(session), session.train(2)
            for other in [name for name in LAYOUTS if name in found]:
                found[other, writer] = _read(found[other][0])
            found["masters", writer] = _masters(f"{shared[0]}/masters")
    return found


def _masters(folder: str) -> dict:
    """bf16 weights with fp32 masters: those that the first layout wrote."""
    session = Run(replace(CHECKPOINTED, dtype=torch.bfloat16).with_forge(recipe="fp32-master"))
    if os.path.exists(folder):
        load(session, folder)
    else:
        session.train(2)
        os.makedirs(folder, exist_ok=True)
        dist.barrier()
        save(session, folder)
    return owned_state(session)


def _read(folder: str) -> tuple[dict, dict]:
    session = Run(CHECKPOINTED)
    load(session, folder)
    return owned_state(session), session.train(2)


def test_masters_are_read_in_another_layout(checkpoints):
    first, *others = (
        {n: state for rank in checkpoints for n, state in rank["masters", where].items()} for where in LAYOUTS
    )
    assert all("master" in state for state in first.values())
    for found in others:
        assert found.keys() == first.keys()
        for name, state in first.items():
            for key, value in state.items():
                assert torch.equal(value, found[name][key]), (name, key)


def _read_of_stages(folder: str) -> dict:
    found = {}
    for reader, degrees in list(LAYOUTS.items())[:-1]:
        with layout(**degrees):
            found["stages", reader] = _read(folder)
    return found


@pytest.fixture(scope="module")
def checkpoints():
    """Of each rank."""
    written = checkpoint_workers.results(4)["_written"]
    read = run(4, _read_of_stages, written[0]["stages"][0])
    shutil.rmtree(os.path.dirname(written[0]["stages"][0]))
    return [here | there for here, there in zip(written, read, strict=True)]


@workers
def _pairs() -> dict:
    """Each data-parallel rank has batches of its own."""
    found = {}
    for chunks in (None, 2):
        with layout(**STAGES, vp=chunks):
            for name, (case, of_stage) in CASES.items():
                if of_stage == chunks:
                    found[name] = train_both(replace(case, own_batches=True))
    return found


def test_trains_like_megatron(results):
    ranks = results["_pairs"]
    expect_equal(ranks, list(CASES))
    for name, (case, _) in CASES.items():
        experts = [{weight for weight in rank[name][1]["weights"] if ".local_experts." in weight} for rank in ranks]
        # Half the layers, two experts, two linears: no two ranks have the same.
        assert [len(each) for each in experts] == [2 * case.layers] * 4
        assert len(set().union(*experts)) == 8 * case.layers


@workers
def _beside_one_process() -> dict:
    """The same batches everywhere, so that each rank can be the one process, too."""
    with layout(**STAGES):
        staged = train(BASE.with_forge())
        in_one_tensor = train(grouped(BASE))
    with layout(tp=1, ep=1):
        alone = train(BASE)
    return {"staged": staged, "in one tensor": in_one_tensor, "alone": alone}


def test_trains_like_one_process_that_has_all_experts_and_layers(results):
    ranks = results["_beside_one_process"]
    alone = ranks[0]["alone"]
    for how in ("staged", "in one tensor"):
        for rank in ranks:
            ours = rank[how]
            assert ours["norms"] == pytest.approx(alone["norms"], rel=1e-5)
            for weight, value in by_expert(ours["weights"]).items():
                torch.testing.assert_close(value, alone["weights"][weight], rtol=0, atol=5e-5)
        assert gap(ranks[-1][how]["losses"], alone["losses"]) <= LOSS


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (a, b)
        for a in LAYOUTS
        for b in LAYOUTS
        if "stages" in (a, b) or list(LAYOUTS).index(a) <= list(LAYOUTS).index(b)
    ],
)
def test_a_checkpoint_is_read_in_another_layout(checkpoints, writer, reader):
    """The states bit for bit; the step after it too, where the layout is the same."""
    ranks = checkpoints
    written = {name: state for rank in ranks for name, state in rank[writer][1].items()}
    read = {name: state for rank in ranks for name, state in rank[writer, reader][0].items()}
    assert written.keys() == read.keys()
    for name, state in written.items():
        assert state.keys() == read[name].keys()
        for key, value in state.items():
            assert torch.equal(value, read[name][key]), (name, key)
    straight, resumed = ranks[-1][writer][2], ranks[-1][writer, reader][1]
    assert gap(straight["losses"], resumed["losses"]) <= (0.0 if writer == reader else LOSS)
    assert resumed["norms"] == pytest.approx(straight["norms"], rel=1e-5)
