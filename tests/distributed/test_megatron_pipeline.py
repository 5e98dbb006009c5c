"""A GPT cut into pipeline stages with FORGE, against Megatron's own optimizer on the whole model in one process."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, gap, layout, load, owned_state, poison, run, save

pytestmark = pytest.mark.timeout(900)

# Gate MG's bound for fp32.
LOSS = 2e-6
BASE = Case(layers=4, steps=4, micro_batches=4)
FREED = {"deallocate_pipeline_outputs": True}
# What Megatron asks for where the next stage is the one before, too: two stages with chunks. Its schedule frees an
# output while it is being sent, which a stream allows and gloo, which reads the memory when it sends, does not.
OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}

# (case, stages, chunks of each)
CASES = {
    "1F1B": (replace(BASE, model=FREED), 2, None),
    "1F1B, clip off": (replace(BASE, clip=0.0, model=FREED), 2, None),
    "one micro-batch, clip off": (replace(BASE, clip=0.0, micro_batches=1, model=FREED), 2, None),
    "tied": (replace(BASE, tied=True, clip=0.05, model=FREED), 2, None),
    "per-token loss": (replace(BASE, model={**FREED, "calculate_per_token_loss": True}), 2, None),
    "full recomputation": (
        replace(
            BASE,
            model={
                **FREED,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        2,
        None,
    ),
    "interleaved": (replace(BASE, model=OVERLAPPED), 2, 2),
    "interleaved, tied, clip off": (replace(BASE, tied=True, clip=0.0, model=OVERLAPPED), 2, 2),
}
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _merged(parts: list[dict]) -> dict:
    return {name: value for part in parts for name, value in part.items()}


def train(case: Case, stages: int, chunks: int | None, tp: int = 1) -> dict:
    """The curve of the last stage, and the weights of all of them."""
    from megatron.core import parallel_state

    with layout(tp=tp, pp=stages, vp=chunks):
        found = Run(case).train()
        everywhere: list = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (found["losses"], found["norms"], found["weights"]))
        last = parallel_state.get_pipeline_model_parallel_last_rank()
    losses = everywhere[last][0]
    norms = {tuple(each[1]) for each in everywhere}
    assert len(norms) == 1, "every stage has the one norm"
    return {"losses": losses, "norms": list(norms.pop()), "weights": _merged([each[2] for each in everywhere])}


def whole(case: Case) -> dict:
    """Megatron's optimizer; every rank is a process that trains the whole model on the same batches."""
    with layout(tp=1):
        return Run(replace(case, forge=None)).train()


# (case, stages, chunks of each, tensor-parallel size), on four processes
LARGE = {
    "four stages, tied": (replace(BASE, tied=True, model=FREED), 4, None, 1),
    "four stages, interleaved": (replace(BASE, layers=8, model=FREED), 4, 2, 1),
    "tensor parallel, tied": (replace(BASE, tied=True, clip=0.05, sequence_parallel=True, model=FREED), 2, None, 2),
    "tensor parallel, interleaved": (replace(BASE, sequence_parallel=True, model=OVERLAPPED), 2, 2, 2),
}


@workers
def _all() -> dict:
    return {
        name: (whole(case), train(case.with_forge(), stages, chunks)) for name, (case, stages, chunks) in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process_does(results, name):
    theirs, ours = results["_all"][0][name]
    assert gap(theirs["losses"], ours["losses"]) <= LOSS
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    assert ours["weights"].keys() - {"output_layer.weight"} == theirs["weights"].keys() - {"output_layer.weight"}
    for weight, value in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][weight], value, rtol=0, atol=5e-5)


def _large() -> dict:
    found = {}
    for name, (case, stages, chunks, tp) in LARGE.items():
        ours = train(case.with_forge(), stages, chunks, tp)
        with layout(tp=tp):
            found[name] = Run(case).train(), ours
    return found


def test_four_processes():
    """Losses and norms; a rank holds a shard of each weight."""
    first = run(4, _large)[0]
    for theirs, ours in first.values():
        assert gap(theirs["losses"], ours["losses"]) <= LOSS
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


RESUMED = {
    "1F1B": (replace(BASE, clip=0.05, tied=True, model=FREED).with_forge(), 2, None),
    "interleaved": (replace(BASE, model=OVERLAPPED).with_forge(), 2, 2),
    "statistics of a layer": (replace(BASE, model=FREED).with_forge(rule="adafactor"), 2, None),
}


@workers
def _resumed() -> dict:
    """Saved after two steps, then trained on; resumed in the same stages, and in one."""
    found = {}
    for name, (case, stages, chunks) in RESUMED.items():
        shared = [tempfile.mkdtemp()]
        dist.broadcast_object_list(shared)
        with layout(tp=1, pp=stages, vp=chunks):
            straight, again = Run(case), Run(case)
            straight.train(2)
            save(straight, shared[0])
            load(again, shared[0])
            curves = [session.train(3) for session in (straight, again)]
            states = [owned_state(session) for session in (straight, again)]
        found[name] = curves, states, shared[0]
    return found


def _by_one_process(folders: dict[str, str]) -> dict:
    found = {}
    for name, folder in folders.items():
        session = Run(replace(RESUMED[name][0], model={}))
        load(session, folder)
        found[name] = session.train(3)
        shutil.rmtree(folder)
    return found


@pytest.fixture(scope="module")
def by_one_process(results):
    folders = {name: folder for name, (_, _, folder) in results["_resumed"][0].items()}
    return run(1, _by_one_process, folders)[0]


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_stages_is_resumed_bit_for_bit_and_by_one_process(results, by_one_process, name):
    for (straight, again), (states, states_again), _ in (each[name] for each in results["_resumed"]):
        assert straight["losses"] == again["losses"]
        assert straight["norms"] == again["norms"]
        assert all(torch.equal(value, again["weights"][key]) for key, value in straight["weights"].items())
        for weight, state in states.items():
            assert all(torch.equal(value, states_again[weight][key]) for key, value in state.items()), weight
        assert by_one_process[name]["norms"] == pytest.approx(straight["norms"], rel=1e-5)
    assert gap(by_one_process[name]["losses"], straight["losses"]) <= LOSS


@workers
def _overflows() -> dict:
    """A gradient that is not finite on the last stage alone, without and with a loss scale."""
    found = {}
    scaled = {"initial_loss_scale": 2.0**10, "min_loss_scale": 1.0, "hysteresis": 1}
    for name, case in {
        "fp32": replace(BASE, model=FREED),
        "fp16": replace(BASE, dtype=torch.float16, optimizer=scaled, model=FREED),
    }.items():
        with layout(tp=1, pp=2):
            session = Run(case.with_forge())
            session.backward()
            session.step()
            before, states = session.weights(), owned_state(session)
            session.backward()
            if dist.get_rank() == 1:
                poison(session, float("inf"))
            success, _ = session.step()
            after, states_after = session.weights(), owned_state(session)
            same = all(torch.equal(value, after[key]) for key, value in before.items()) and all(
                torch.equal(value, states_after[key][one])
                for key, state in states.items()
                for one, value in state.items()
            )
            found[name] = success, same, float(session.optimizer.get_loss_scale()), session.train(1)["norms"]
    return found


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_an_overflow_on_one_stage_skips_every_stage(results, name):
    for success, same, scale, norms in (each[name] for each in results["_overflows"]):
        assert not success
        assert same
        assert scale == (1.0 if name == "fp32" else 2.0**9)
        assert math.isfinite(norms[0])
