"""Several instances of the distributed optimizer, each with all states, against Megatron's own and against one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_harness import Case, Run, Workers, layout, load, run, save, train_both
from megatron_pairs import expect_equal

pytestmark = pytest.mark.timeout(900)

SHARDED = {"use_distributed_optimizer": True}
BASE = Case(steps=3, own_batches=True, optimizer=SHARDED, ddp=SHARDED | {"num_distributed_optimizer_instances": 2})
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "overlap": replace(BASE, clip=0.0, ddp=BASE.ddp | {"overlap_grad_reduce": True, "bucket_size": 256}),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches, fused head, tied": replace(BASE, micro_batches=2, tied=True, fused_head=True),
}
#: Of three columns behind a gate, four ranks have some rows each, and one none.
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "ffn_hidden_size": 3}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall"}
EXPERTS = replace(CASES["clipped"], model=GATED | MOE, layers=1)

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(4)


@workers
def _pairs() -> dict:
    with layout(tp=1, instances=2):
        return {name: train_both(case) for name, case in CASES.items()}


@workers
def _one_instance() -> dict:
    with layout(tp=1):
        return {name: Run(replace(case, ddp=SHARDED).with_forge()).train() for name, case in CASES.items()}


@workers
def _beside_others() -> dict:
    """Two ranks have each expert, and each shard of a tensor: an instance is one of them."""
    found = {}
    with layout(tp=1, ep=2, instances=2):
        found["experts over two"] = train_both(EXPERTS)
    with layout(tp=2, instances=2):
        found["tensor shards"] = train_both(replace(CASES["clipped"], sequence_parallel=True))
    with layout(tp=1, cp=2, instances=2):
        found["context"] = train_both(replace(CASES["clipped"], model={"cp_comm_type": "a2a"}))
    return found


def test_trains_like_megatron(results):
    ranks = results["_pairs"]
    expect_equal(ranks, CASES)
    for name in CASES:
        for other in ranks[1:]:
            assert other[name][1]["losses"] != ranks[0][name][1]["losses"]
            for weight, value in ranks[0][name][1]["weights"].items():
                assert torch.equal(value, other[name][1]["weights"][weight]), (name, weight)


def test_trains_like_one_instance(results):
    """The sums are in another order, and nothing else."""
    for rank, one in zip(results["_pairs"], results["_one_instance"], strict=True):
        for name in CASES:
            assert rank[name][1]["norms"] == pytest.approx(one[name]["norms"], rel=1e-5)
            for weight, value in one[name]["weights"].items():
                torch.testing.assert_close(rank[name][1]["weights"][weight], value, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["experts over two", "tensor shards", "context"])
def test_beside_other_parallelism(results, name):
    ranks = results["_beside_others"]
    expect_equal(ranks, [name])
    for one, other in ((0, 2), (1, 3)):
        for weight, value in ranks[one][name][1]["weights"].items():
            assert torch.equal(value, ranks[other][name][1]["weights"][weight]), weight


# ---- states and checkpoints

MIXED = replace(CASES["clipped"], dtype=torch.bfloat16, model=GATED, layers=1, own_batches=False)
MASTERS = MIXED.with_forge(recipe="fp32-master")


def _held(session: Run) -> dict[str, torch.Tensor]:
    forge = session.optimizer.chained_optimizers[0].forge
    return {f"{forge.names[p]} {key}": v.clone() for p, state in forge.state.items() for key, v in state.items()}


def _write(folder: str) -> tuple[dict, dict, dict]:
    session = Run(MASTERS)
    session.train(2)
    save(session, folder)
    return _held(session), session.train(1)["weights"], _read(folder)


def _read(folder: str, **others) -> tuple[dict, dict]:
    session = Run(replace(MASTERS, **others))
    load(session, folder)
    return _held(session), session.train(1)["weights"]


def _read_by_one(folder: str) -> tuple[dict, dict]:
    return _read(folder, ddp=SHARDED)


def test_a_checkpoint_has_the_states_once(tmp_path):
    ranks = run(4, _write, str(tmp_path), tp=1, instances=2)
    for held, straight, (resumed, then) in ranks:
        assert all(torch.equal(held[name], resumed[name]) for name in held)
        assert all(torch.equal(straight[name], then[name]) for name in straight)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(value, ranks[other][0][name]) for name, value in ranks[one][0].items())
    halves = [held for held, _ in run(2, _read_by_one, str(tmp_path), tp=1)]
    for (held, *_), half in zip(ranks[:2], halves, strict=True):
        assert held.keys() == half.keys()
        assert all(torch.equal(value, half[name]) for name, value in held.items())
