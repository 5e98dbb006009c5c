"""The output layer and the loss in one, under tensor parallelism."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from megatron_harness import VOCAB, Case, Run, Workers, build_model

pytestmark = pytest.mark.timeout(600)

workers = Workers()
CASE = Case(sequence_parallel=True, clip=0.0, fused_head=True).with_forge()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@contextmanager
def _blocks_of_16_rows():
    from forge_megatron.vocab import logits

    before, logits.BLOCK_LOGITS = logits.BLOCK_LOGITS, 1
    try:
        yield
    finally:
        logits.BLOCK_LOGITS = before


@workers
def _widths() -> list[int]:
    """Of a block of logits that forward and backward form, by rows of this rank's vocabulary."""
    from forge_megatron.vocab.logits import Head

    original, widths = Head.logits, []

    def watched(self, rows):
        found = original(self, rows)
        widths.append(found[0].shape[1])
        return found

    with _blocks_of_16_rows():
        Head.logits = watched
        try:
            Run(CASE).backward()
        finally:
            Head.logits = original
    return widths


def test_the_logits_are_formed_by_blocks(results):
    for widths in results["_widths"]:
        assert widths == [16] * (2 * VOCAB // 2 // 16)


def _outputs(*, labelled: bool) -> tuple[torch.Tensor, ...]:
    found = []
    for case in (CASE, Case(sequence_parallel=True, clip=0.0)):
        session = Run(case)
        batch = session.batch()
        session.model.train(not labelled)
        with torch.no_grad():
            labels = batch["labels"] if labelled else None
            found.append(session.model(batch["tokens"], batch["positions"], None, labels=labels))
    return tuple(found)


@workers
def _without_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the same weights with the fused head and with Megatron's."""
    return _outputs(labelled=False)


def test_a_model_without_labels_returns_its_logits(results):
    for ours, theirs in results["_without_labels"]:
        assert ours.shape == theirs.shape == (2, 16, VOCAB // 2)
        assert torch.equal(ours, theirs)


@workers
def _evaluation() -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(labelled=True)


def test_the_loss_without_gradients(results):
    for ours, theirs in results["_evaluation"]:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@workers
def _refused() -> list[str]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from forge_megatron.megatron import prepare

    class Own(ColumnParallelLinear):
        pass

    def own_layer(model):
        model.output_layer.__class__ = Own

    def own_model(model):
        model.__class__ = type("Mine", (type(model),), {})

    found = []
    for case, edit in ((Case(model={"mtp_num_layers": 1}), lambda _: None), (Case(), own_layer), (Case(), own_model)):
        model = build_model(case)
        edit(model)
        classes = [type(module) for module in model.modules()]
        with pytest.raises(NotImplementedError) as raised:
            prepare([model], fused_head=True)
        assert [type(module) for module in model.modules()] == classes
        found.append(str(raised.value))
    return found


def test_what_reads_the_logits_is_refused_by_name(results):
    for prediction, layer, model in results["_refused"]:
        assert "mtp_num_layers=1 reads the logits" in prediction
        assert "output_layer is a Own" in layer
        assert "GPTModel, not Mine" in model
