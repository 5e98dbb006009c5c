"""Context parallelism in Megatron without Transformer Engine: the attention, and training with FORGE."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from dense_attention import dense, operands
from megatron_harness import Case, Workers, context_parts, gap, layout, run, train, train_both

pytestmark = pytest.mark.timeout(900)

KINDS = ("a2a", "all_gather", "p2p")
HEADS = 8


def _part(whole: torch.Tensor) -> torch.Tensor:
    return context_parts({"tokens": whole.transpose(0, 1)})["tokens"].transpose(0, 1)


def _attention(kind: str, groups: int, scale: float | None) -> float:
    """The largest difference from the dense formula, of the output and of the three gradients; everything is fp64."""
    from types import SimpleNamespace

    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    from forge_megatron.megatron.attention import ForgeDotProductAttention

    config = SimpleNamespace(
        attention_dropout=0.0, window_size=None, softmax_type="vanilla", num_attention_heads=HEADS,
        tensor_model_parallel_size=1, context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )  # fmt: skip
    layer = ForgeDotProductAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=scale, cp_comm_type=kind)
    *wholes, dout = operands(torch.float64, 24, HEADS, groups, 4, 6)
    out, dout = dense(*wholes, scale).flatten(2), dout.flatten(2)
    theirs = [out, *torch.autograd.grad(out, wholes, dout)]
    parts = [_part(whole.detach()).requires_grad_() for whole in wholes]
    mine = layer(*parts, None)
    ours = [mine, *torch.autograd.grad(mine, parts, _part(dout))]
    return max((a - _part(b.detach())).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def _attentions() -> dict:
    groups = (HEADS, 4, 2, 1)
    found = {(kind, count): _attention(kind, count, None) for kind in KINDS for count in groups}
    return found | {(kind, "scale"): _attention(kind, 2, 0.7) for kind in KINDS}


# Gate MG's bound for fp32.
LOSS = 2e-6
# Of a weight's norm: Adam divides a coordinate's gradient by its size, so that one which is all rounding moves as far
# as any other, and single coordinates cannot be compared.
WEIGHT = 1e-4
BASE = Case(steps=4)
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches, fused head, tied": replace(BASE, micro_batches=2, tied=True, fused_head=True),
    "per-token loss": replace(BASE, micro_batches=2, model={"calculate_per_token_loss": True}),
    "distributed optimizer": replace(
        BASE, ddp={"use_distributed_optimizer": True}, optimizer={"use_distributed_optimizer": True}
    ),
    "overlap": replace(BASE, clip=0.0, ddp={"overlap_grad_reduce": True, "bucket_size": 256}),
}
COMPOSED = ("in backward", "micro-batches, fused head, tied", "per-token loss")


def _case(name: str, kind: str = "all_gather", **changes) -> Case:
    case = replace(CASES[name], **changes)
    return replace(case, model={**case.model, "cp_comm_type": kind, "num_query_groups": 2})


def _pairs(names: Iterable[str], kinds: Iterable[str] = KINDS, **changes) -> dict:
    return {(name, kind): train_both(_case(name, kind, **changes)) for name in names for kind in kinds}


def _dense_runs() -> dict:
    """The whole sequence in one process, with Megatron's own optimizer."""
    return {name: train(_case(name)) for name in CASES}


workers = Workers()


@workers
def _context() -> dict:
    with layout(cp=4):
        return {"attention": _attentions(), "pairs": _pairs(CASES, KINDS[:1]) | _pairs(COMPOSED[:2], KINDS[1:])}


@workers
def _beside_data() -> dict:
    with layout(tp=1, cp=2):
        return {"attention": _attentions(), "pairs": _pairs(COMPOSED, KINDS[1:], own_batches=True)}


@workers
def _beside_tensor() -> dict:
    with layout(tp=2, cp=2):
        return {"pairs": _pairs(COMPOSED, KINDS[:1], sequence_parallel=True)}


@workers
def _beside_pipeline() -> dict:
    with layout(tp=1, pp=2, cp=2):
        return {"pairs": _pairs(COMPOSED[1:], KINDS[:1])}


@pytest.fixture(scope="module")
def results():
    return workers.results(4)


@pytest.fixture(scope="module")
def alone():
    return run(1, _dense_runs)[0]


def _expect_equal(theirs: dict, ours: dict, case: object) -> None:
    assert gap(theirs["losses"], ours["losses"]) <= LOSS, case
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5), case
    for weight, value in theirs["weights"].items():
        assert (ours["weights"][weight] - value).norm() <= WEIGHT * value.norm(), (case, weight)


@pytest.mark.parametrize("name", ["_context", "_beside_data"])
def test_attention_equals_the_dense_formula(results, name):
    for rank in results[name]:
        for case, distance in rank["attention"].items():
            assert distance < 1e-13, case


@pytest.mark.parametrize(
    ("name", "replicas"),
    [("_context", (1, 2, 3)), ("_beside_data", (1, 2, 3)), ("_beside_tensor", (2,)), ("_beside_pipeline", (1,))],
)
def test_trains_like_megatron(results, name, replicas):
    """With its own optimizer on the same ranks, with the same attention; replicas are bit-equal."""
    ranks = [rank["pairs"] for rank in results[name]]
    for rank in ranks:
        for case, (theirs, ours) in rank.items():
            _expect_equal(theirs, ours, case)
    for other in replicas:
        for case, (_, ours) in ranks[0].items():
            for weight, value in ours["weights"].items():
                assert torch.equal(value, ranks[other][case][1]["weights"][weight]), (case, weight)


def test_trains_like_one_process_that_has_the_whole_sequence(results, alone):
    for case, (_, ours) in results["_context"][0]["pairs"].items():
        _expect_equal(alone[case[0]], ours, case)
    for name in ("_beside_tensor", "_beside_pipeline"):
        for case, (_, ours) in results[name][-1]["pairs"].items():
            assert gap(alone[case[0]]["losses"], ours["losses"]) <= LOSS, (name, case)
            assert ours["norms"] == pytest.approx(alone[case[0]]["norms"], rel=1e-5), (name, case)
