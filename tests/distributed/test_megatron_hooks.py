"""A user's gradient hook on an owned weight of a Megatron GPT, against the same hook under Megatron's own optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_harness import Case, Run, Workers, layout
from megatron_pairs import expect_equal

pytestmark = pytest.mark.timeout(900)

SHARDED = {"use_distributed_optimizer": True}
TENSOR = Case(sequence_parallel=True)
DATA = Case(own_batches=True)
CASES = {
    "in backward": replace(TENSOR, clip=0.0),
    "clipped, micro-batches, fused head": replace(TENSOR, micro_batches=2, fused_head=True),
}
DATA_CASES = {
    "in backward": replace(DATA, clip=0.0),
    "distributed optimizer, clipped": replace(DATA, optimizer=SHARDED, ddp=SHARDED),
}
HOOKED = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "output_layer.weight",
)
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _train(case: Case) -> dict:
    """A hook doubles gradients in the second and third step, another looks at one in the third; then both are gone."""
    session = Run(case)
    parameters = dict(session.model.named_parameters())
    seen, handles = [], []
    found: dict = {"losses": [], "norms": [], "seen": seen, "how": []}
    for step in range(5):
        if step == 1:
            handles = [parameters[name].register_hook(lambda grad: grad * 2) for name in HOOKED]
        if step == 2:
            last = parameters[HOOKED[1]]
            handles.append(last.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item())))
        if case.forge is not None:
            rows = [row for optimizer in session.optimizer.chained_optimizers for row in optimizer.forge.coverage]
            found["how"].append(sorted(row.name for row in rows if "hook" in row.how))
        part = session.train(1)
        found["losses"] += part["losses"]
        found["norms"] += part["norms"]
        if step == 2:
            while handles:
                handles.pop().remove()
    found["weights"] = session.weights()
    found["left"] = [name for name in HOOKED if case.forge is not None and parameters[name].grad is not None]
    return found


@workers
def _tensor() -> dict:
    return {name: (_train(case), _train(case.with_forge())) for name, case in CASES.items()}


@workers
def _data() -> dict:
    with layout(tp=1):
        return {name: (_train(case), _train(case.with_forge())) for name, case in DATA_CASES.items()}


@pytest.mark.parametrize("found", ["_tensor", "_data"])
def test_a_hook_sees_and_changes_the_gradient_as_without_forge(results, found):
    expect_equal(results[found], list(results[found][0]))
    for pairs in results[found]:
        for name, (theirs, ours) in pairs.items():
            assert ours["how"] == [[], sorted(HOOKED), sorted(HOOKED), [], []], name
            assert ours["left"] == []
            if "micro" not in name:
                assert ours["seen"] == pytest.approx(theirs["seen"], rel=1e-4), name
            assert len(ours["seen"]) == len(theirs["seen"]) > 0


@workers
def _late() -> tuple[str, bool]:
    """Registered between forward and backward."""
    session = Run(replace(TENSOR, clip=0.0).with_forge())
    session.train(1)
    before = session.weights()
    batch = session.batch()
    losses = session.model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    message = ""
    try:
        session.model.get_parameter(HOOKED[1]).register_hook(lambda grad: grad)
        losses.mean().backward()
    except RuntimeError as error:
        message = str(error)
    after = session.weights()
    return message, all(torch.equal(before[name], after[name]) for name in before)


def test_a_hook_after_the_forward_is_refused(results):
    for message, same in results["_late"]:
        assert HOOKED[1] in message
        assert "gradient hook" in message
        assert same
