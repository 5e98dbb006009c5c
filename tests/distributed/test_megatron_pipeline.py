"""A GPT cut into pipeline stages with FORGE, against Megatron's own optimizer on the whole model in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, gap, layout, run

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
