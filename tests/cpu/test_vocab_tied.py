"""An embedding tied to its head: one update from both gradients, inside backward, by the row that each reaches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge
from forge_megatron.vocab import linear_cross_entropy, logits
from tests.cpu.training import Pair, backends

IDS = torch.tensor([[1, 4, 4, 30], [0, 9, 4, 1]])


@pytest.fixture(autouse=True)
def blocks_of_16_rows(monkeypatch):
    monkeypatch.setattr(logits, "BLOCK_LOGITS", 1)


class Tied(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 6, padding_idx=padding_idx)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = self.embedding.weight

    def body(self, ids):
        return torch.tanh(self.block(self.embedding(ids)))


def whole(model, ids):
    return F.cross_entropy(model.head(model.body(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())


def fused(model, ids):
    return linear_cross_entropy(model.body(ids[:, :-1]), model.head, ids[:, 1:])


HEADS = pytest.mark.parametrize("head", [whole, fused])


def close_window(pair, losses):
    for (model, _), loss in zip(pair.sides(), losses, strict=True):
        loss(model).backward()


@backends
@HEADS
@pytest.mark.parametrize("padding_idx", [None, 4])
def test_both_gradients_in_one_update_inside_backward(backend, head, padding_idx):
    """Every row decays by half a step, so that a row that is stepped twice or never is far off."""
    pair = Pair(Tied(padding_idx), weight_decay=0.5, eps=1e-6, backend=backend)
    for shift in range(3):
        ids = (IDS + shift) % 37
        close_window(pair, (lambda model, ids=ids: head(model, ids), lambda model, ids=ids: whole(model, ids)))
        assert pair.optimizer.owned[pair.model.head.weight].updated
        pair.close()
    pair.expect_equal()


@backends
@HEADS
@pytest.mark.parametrize("options", [{"clip": 0.05}, {"accumulation_steps": 3}], ids=str)
def test_waiting(backend, head, options):
    pair = Pair(Tied(), eps=1e-6, backend=backend, **options)
    for _ in range(2):
        for shift in range(options.get("accumulation_steps", 1)):
            ids = (IDS + shift) % 37
            close_window(pair, (lambda model, ids=ids: head(model, ids), lambda model, ids=ids: whole(model, ids)))
        pair.close()
    pair.expect_equal()
    if "clip" in options:
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("accumulation_steps", [1, 2, 9])
@pytest.mark.parametrize("rule", ["lamb", "adafactor"])
def test_rules_that_read_more_than_their_coordinate(rule, accumulation_steps):
    """By blocks of rows as from whole logits, and from factors that outgrew the gradient."""
    models = [Tied(), Tied()]
    for model, head in zip(models, (fused, whole), strict=True):
        optimizer = forge.attach(model, rule, lr=1e-2, accumulation_steps=accumulation_steps)
        for _ in range(2):
            for shift in range(accumulation_steps):
                head(model, (IDS + shift) % 37).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@HEADS
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_embedding(head, reentrant):
    """Reentrant, the embedding's graph does not exist yet when the head's gradient does."""
    pair = Pair(Tied(), eps=1e-6)
    anchor = torch.zeros((), requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.head = model, model.head

        def body(self, ids):
            return checkpoint(lambda ids, _: self.model.body(ids), ids, anchor, use_reentrant=reentrant)

    for _ in range(2):
        close_window(
            pair, (lambda model: head(Checkpointed(model), IDS), lambda model: whole(Checkpointed(model), IDS))
        )
        pair.close()
    pair.expect_equal()
