"""Experts in one tensor with FORGE, against Megatron's own optimizer on SequentialMLP in the same layout."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron_harness import Case, Run, layout, run
from megatron_pairs import expect_equal, expect_equal_experts
from test_megatron_experts import BIASED, MODEL, STARVED, _over, _starve

from gates import ep1

pytestmark = pytest.mark.timeout(900)

GATED = {**MODEL, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
BASE = Case(steps=3, own_batches=True, model=GATED)
SHARDED = {"use_distributed_optimizer": True}
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches": replace(BASE, micro_batches=2, model=MODEL),
    "distributed optimizer": replace(BASE, clip=0.05, optimizer=SHARDED, ddp=SHARDED),
    "expert without tokens": replace(BASE, clip=0.0, model=BIASED),
    "rank without tokens": replace(BASE, clip=0.0, model=BIASED),
}
LAYOUTS = {
    "experts over two data-parallel ranks": (
        {"tp": 1, "ep": 2}, "in backward", "clipped", "rank without tokens", "distributed optimizer",
    ),
    "shards of experts": ({"tp": 2, "ep": 2}, "in backward", "clipped"),
    "whole experts beside tensor parallelism": ({"tp": 2, "ep": 2, "etp": 1}, "micro-batches"),
}  # fmt: skip


def grouped(case: Case) -> Case:
    return replace(case, model={**case.model, "moe_grouped_gemm": True}).with_forge()


def by_expert(weights: dict) -> dict:
    """Those of experts in one tensor, by the names of SequentialMLP's."""
    each = (ep1.by_expert(name, [value]) for name, value in weights.items())
    return {name: value for found in each for name, (value,) in found.items()}


def both(name: str, case: Case) -> tuple[dict, dict]:
    edit = partial(_starve, STARVED[name]) if name in STARVED else None
    session = Run(grouped(case), edit)
    owned = {row.name for one in session.optimizer.chained_optimizers for row in one.forge.coverage.rows if row.fused}
    assert sum(re.search(r"experts\.\d+-\d+\.linear_fc[12]\.weight", row) is not None for row in owned) == 4, owned
    ours = session.train()
    return Run(case, edit).train(), {**ours, "weights": by_expert(ours["weights"])}


def on_two_ranks() -> dict:
    return {name: both(name, case) for name, case in CASES.items()}


def test_trains_as_sequential_experts_with_megatrons_optimizer():
    expect_equal(run(2, on_two_ranks, tp=1, ep=2), list(CASES))


def in_layouts() -> dict:
    found = {}
    for what, (degrees, *names) in LAYOUTS.items():
        with layout(**degrees):
            for name in names:
                found[f"{what}, {name}"] = both(name, _over(degrees, CASES[name]))
    return found


def test_every_layout_of_four_ranks_trains_alike():
    pairs = run(4, in_layouts)
    expect_equal(pairs, list(pairs[0]))
    expect_equal_experts(pairs)


def refusals() -> dict[str, str]:
    found = {}
    for rule, recipe in (("lamb", None), ("muon", None), (None, "sr-store")):
        options = {"rule": rule, "recipe": recipe}
        dtype = torch.bfloat16 if recipe else torch.float32
        case = replace(_over({"tp": 2}, replace(CASES["in backward"], dtype=dtype)), forge=options)
        with pytest.raises(NotImplementedError) as raised:
            Run(replace(grouped(case), forge=options))
        found[rule or recipe] = str(raised.value)
    return found


def test_what_is_not_built_is_refused_by_name():
    for found in run(2, refusals, tp=2, ep=1):
        assert re.match(r"--forge-rule lamb reads whole matrices, .*moe_grouped_gemm off", found["lamb"])
        assert re.match(r"--forge-rule muon reads whole matrices", found["muon"])
        assert re.search(
            r"linear_fc1.*stochastic rounding of shards .*expert_tensor_parallel_size=1", found["sr-store"]
        )
