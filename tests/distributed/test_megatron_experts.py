"""Experts on several ranks with FORGE, against Megatron's own optimizer in the same layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron_harness import Case, Run, layout, run, step_from_grad
from megatron_pairs import expect_equal, expect_equal_experts

pytestmark = pytest.mark.timeout(900)

MODEL = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_aux_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}
# Scores to which a bias is added where experts are chosen, and only there.
BIASED = {**MODEL, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
BASE = Case(steps=4, own_batches=True, model=MODEL)
SHARDED = {"use_distributed_optimizer": True}
CASES = {
    "distributed optimizer": replace(BASE, clip=0.05, optimizer=SHARDED, ddp=SHARDED),
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches": replace(BASE, micro_batches=2),
    "per-token loss": replace(BASE, micro_batches=2, model={**MODEL, "calculate_per_token_loss": True}),
    "expert without tokens": replace(BASE, clip=0.0, model=BIASED),
    "rank without tokens": replace(BASE, clip=0.0, model=BIASED),
}
STARVED = {"expert without tokens": [3], "rank without tokens": [2, 3]}


def _starve(experts: list[int], model) -> None:
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias[experts] = -10.0


def _both(name: str, case: Case) -> tuple[dict, dict]:
    edit = partial(_starve, STARVED[name]) if name in STARVED else None
    return Run(case, edit).train(), Run(case.with_forge(), edit).train()


def _in_pairs(names: list[str]) -> dict:
    return {name: _both(name, CASES[name]) for name in names}


def _experts(weights: dict) -> dict:
    return {name: value for name, value in weights.items() if ".local_experts." in name}


def test_trains_like_megatron():
    names = list(CASES)
    pairs = run(2, _in_pairs, names, tp=1, ep=2)
    expect_equal(pairs, names)
    for name in names:
        (_, first), (_, second) = (rank[name] for rank in pairs)
        here, there = first["weights"], second["weights"]
        assert len(_experts(here)) == len(_experts(there)) == 2 * 2 * 2
        assert not _experts(here).keys() & _experts(there).keys()
        for weight in here.keys() & there.keys():
            assert torch.equal(here[weight], there[weight]), (name, weight)


LAYOUTS = {
    "experts over two data-parallel ranks": (
        {"tp": 1, "ep": 2}, 2, "in backward", "clipped", "rank without tokens", "distributed optimizer",
    ),
    "an expert a rank": ({"tp": 1, "ep": 4}, 1, "in backward"),
    "shards of experts": ({"tp": 2, "ep": 2}, 1, "in backward", "clipped"),
    "experts over context ranks": ({"tp": 1, "cp": 2, "ep": 2}, 2, "in backward", "per-token loss"),
    "whole experts beside tensor parallelism": (
        {"tp": 2, "ep": 2, "etp": 1}, 2, "in backward", "micro-batches", "distributed optimizer",
    ),
}  # fmt: skip


def _over(degrees: dict[str, int], case: Case) -> Case:
    """The case in a layout; gloo has no collective of unequal parts for what all-to-all leaves to shards of experts."""
    sharded = degrees["tp"] > 1 and degrees.get("etp") != 1
    dispatcher = {"moe_token_dispatcher_type": "allgather"} if sharded else {}
    return replace(case, sequence_parallel=degrees["tp"] > 1, model={**case.model, **dispatcher})


def _in_layouts() -> dict:
    from megatron.core import parallel_state

    found = {}
    for what, (degrees, replicas, *names) in LAYOUTS.items():
        with layout(**degrees):
            assert parallel_state.get_expert_data_parallel_world_size() == replicas
            for name in names:
                found[f"{what}, {name}"] = _both(name, _over(degrees, CASES[name]))
    return found


def test_every_layout_of_four_ranks_trains_like_megatron():
    pairs = run(4, _in_layouts)
    expect_equal(pairs, list(pairs[0]))
    expect_equal_experts(pairs)


def _norm_of(degrees: dict[str, int], fused: bool) -> tuple[float, set[str]]:
    session = Run(_over(degrees, replace(CASES["clipped"], own_batches=False)).with_forge())
    if not fused:
        step_from_grad(session)
    return session.train(1)["norms"][0], set(_experts(session.weights()))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "fallback"])
def test_the_norm_counts_each_expert_once(fused):  # field log row 7
    """On one rank, on expert-parallel ranks, and beside tensor parallelism: from the same weights and batch."""
    ((alone, names),) = run(1, _norm_of, {"tp": 1}, True)
    for degrees in ({"tp": 1, "ep": 2}, {"tp": 2, "ep": 2}):
        found = run(2 * degrees["tp"], _norm_of, degrees, fused, **degrees)
        assert set().union(*(experts for _, experts in found)) == names
        for norm, _ in found:
            assert norm == pytest.approx(alone, rel=1e-5), degrees
