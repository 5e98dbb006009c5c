"""Optimizer state through Megatron's checkpoints: resumed, resharded, and exchanged with runs without FORGE."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from megatron_harness import Case, Run, gap, load, load_schedule, owned_state, run, save

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

LOSS = 2e-6
PLAIN = Case(sequence_parallel=True)
FORGE = PLAIN.with_forge()
TIED = replace(FORGE, tied=True)
BACKWARD = replace(FORGE, clip=0.0)
INT8 = PLAIN.with_forge(recipe="int8")


def _alone(case: Case) -> Case:
    """The case on one tensor-parallel rank, where Megatron refuses sequence parallelism."""
    return replace(case, sequence_parallel=False)


def _write(case: Case, folder: str) -> dict:
    session = Run(case)
    session.train(3)
    save(session, folder)
    found = {"states": owned_state(session) if case.forge is not None else None, "weights": session.weights()}
    return found | {"next": session.train(4)}


def _read(case: Case, folder: str) -> dict:
    session = Run(case)
    load(session, folder)
    states = owned_state(session) if case.forge is not None else None
    return {"states": states, "weights": session.weights(), "next": session.train(4)}


def _round_trip(case: Case, folder: str) -> tuple[dict, dict]:
    return _write(case, folder), _read(case, folder)


@pytest.mark.parametrize("case", [FORGE, TIED, BACKWARD, INT8], ids=["waiting", "tied", "in backward", "int8"])
def test_resume_is_bit_exact(case, tmp_path):
    """Field rows 118 to 121: also the second step after the resume, which lost moments would show."""
    for straight, resumed in run(2, _round_trip, case, str(tmp_path)):
        for name, state in straight["states"].items():
            assert int(resumed["states"][name]["step"]) == 3
            for key in state.keys() - {"step"}:
                # The batches have ids of the first half of the vocabulary, whose rows are the first rank's.
                assert state[key].abs().max() > 0 or "word_embeddings" in name
                assert torch.equal(state[key], resumed["states"][name][key]), (name, key)
        assert straight["next"]["losses"] == resumed["next"]["losses"]
        assert straight["next"]["norms"] == resumed["next"]["norms"]
        for name, value in straight["next"]["weights"].items():
            assert torch.equal(value, resumed["next"]["weights"][name]), name


def test_two_shards_load_on_one_rank(tmp_path):
    """TP 2 to TP 1: the states are the concatenated shards, bit for bit, and the run goes on."""
    two = run(2, _write, FORGE, str(tmp_path))
    (one,) = run(1, _read, _alone(FORGE), str(tmp_path))
    for name, state in one["states"].items():
        shards = [rank["states"][name] for rank in two]
        dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], torch.cat([shard[key] for shard in shards], dim)), (name, key)
    assert gap(one["next"]["losses"], two[0]["next"]["losses"]) <= LOSS
    assert one["next"]["norms"] == pytest.approx(two[0]["next"]["norms"], rel=1e-5)


def _both_ways(folder: str) -> dict:
    found = {}
    for kind, writer, reader in (
        ("theirs to ours", PLAIN, FORGE),
        ("ours to theirs", FORGE, PLAIN),
        ("ours to theirs, tied", TIED, replace(PLAIN, tied=True)),
    ):
        target = f"{folder}/{kind}"
        os.makedirs(target, exist_ok=True)
        torch.distributed.barrier()
        found[kind] = _write(writer, target)["next"], _read(reader, target)["next"]
    return found


def test_runs_with_and_without_forge_read_each_other(tmp_path):
    for found in run(2, _both_ways, str(tmp_path)):
        for kind, (straight, resumed) in found.items():
            assert gap(straight["losses"], resumed["losses"]) <= LOSS, kind
            assert resumed["norms"] == pytest.approx(straight["norms"], rel=1e-5), kind
            for name, value in straight["weights"].items():
                torch.testing.assert_close(resumed["weights"][name], value, rtol=0, atol=5e-5)


def _local(reader: Case, writer: Case) -> tuple[dict, dict]:
    first = Run(writer)
    first.train(3)
    states = [first.model.state_dict(), first.optimizer.state_dict(), first.schedule.state_dict()]
    model, optimizer, schedule = deepcopy(states)
    straight = first.train(3)
    second = Run(reader)
    second.generator.set_state(torch.Generator().manual_seed(99).get_state())
    for _ in range(3 * reader.micro_batches):
        second.batch()
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    load_schedule(second, schedule)
    return straight, second.train(3)


def _local_all() -> dict:
    return {
        "forge": _local(_alone(FORGE), _alone(FORGE)),
        "to forge": _local(_alone(FORGE), _alone(PLAIN)),
        "from forge": _local(_alone(PLAIN), _alone(FORGE)),
    }


def test_local_state_dicts_are_megatrons():
    """The legacy ``torch`` checkpoint format of Megatron-LM."""
    (found,) = run(1, _local_all)
    for kind, (straight, resumed) in found.items():
        assert gap(straight["losses"], resumed["losses"]) <= LOSS, kind
    assert found["forge"][0]["losses"] == found["forge"][1]["losses"]


def _damaged() -> dict:
    session = Run(_alone(FORGE))
    session.train(2)
    before = owned_state(session)
    errors = {}
    names = session.optimizer.chained_optimizers[0].layout
    for kind in ("state", "moment", "shape", "group"):
        saved = session.optimizer.state_dict()
        position = next(i for i, p in enumerate(names.parameters()) if names.owns(p))
        if kind == "state":
            del saved["state"][position]
        elif kind == "moment":
            saved["state"][position] = {k: v for k, v in saved["state"][position].items() if k != "exp_avg"}
        elif kind == "shape":
            saved["state"][position] = {k: v[..., :1] if v.dim() else v for k, v in saved["state"][position].items()}
        else:
            saved["param_groups"] = saved["param_groups"][1:]
        try:
            session.optimizer.load_state_dict(saved)
        except Exception as error:
            errors[kind] = str(error)
    after = owned_state(session)
    same = all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])
    return {"errors": errors, "same": same, "name": names.names[names.parameters()[position]]}


def test_a_damaged_state_is_refused_before_anything_changes():
    """Field row 120."""
    (found,) = run(1, _damaged)
    assert set(found["errors"]) == {"state", "moment", "shape", "group"}
    for kind in ("state", "moment", "shape"):
        assert found["name"] in found["errors"][kind]
    assert found["same"]


def _before_the_first_step(folder: str) -> tuple[dict, dict]:
    session = Run(FORGE)
    save(session, folder)
    again = Run(FORGE)
    load(again, folder)
    again.schedule.step(1 - again.schedule.num_steps)
    return session.train(3), again.train(3)


def test_a_checkpoint_before_the_first_step_loads(tmp_path):
    """Field row 130: a save that would fail fails at the start."""
    for straight, resumed in run(2, _before_the_first_step, str(tmp_path)):
        assert straight["losses"] == resumed["losses"]


def _frozen_for_a_while(folder: str) -> tuple[dict, dict, str]:
    session = Run(FORGE)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    weight = session.model.get_parameter(name)
    session.train(1)
    weight.requires_grad_(False)
    session.train(2)
    weight.requires_grad_(True)
    save(session, folder)
    again = Run(FORGE)
    load(again, folder)
    return owned_state(session), owned_state(again), name


def test_a_weight_that_was_frozen_keeps_its_own_step(tmp_path):
    for written, read, name in run(2, _frozen_for_a_while, str(tmp_path)):
        assert int(read[name]["step"]) == 1
        assert {int(state["step"]) for key, state in read.items() if key != name} == {3}
        assert {key: int(state["step"]) for key, state in written.items()} == {
            key: int(state["step"]) for key, state in read.items()
        }
