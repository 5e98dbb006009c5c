"""Nothing of the order of a parameter but weights and states: at the end of backward, and in no operation before it."""

import copy

import live
import pytest
import torch

import forge_megatron as forge
from forge_megatron.kernels import reference
from forge_megatron.vocab import logits

#: Half of the smallest matrix; activations take a quarter of it.
LARGE = live.WIDTH * live.WIDTH // 2


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", LARGE // 2)
    monkeypatch.setattr(logits, "BLOCK_LOGITS", 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_holds_no_gradient_and_no_logits(tied):
    model = live.LanguageModel(tied)
    optimizer = forge.attach(model, lr=1e-3)
    for seed in range(2):
        ids = live.ids(seed)
        before = live.storages(live.tensors())
        with live.Allocated(before, LARGE) as allocated:
            loss = model(ids)
            loss.backward()
        assert not live.resident(before, LARGE)
        assert not allocated.large
        assert all(owned.updated for owned in optimizer.owned.values())
        optimizer.step()
        optimizer.zero_grad()


def test_what_waits_for_the_step_is_smaller_than_a_gradient():
    model = live.LanguageModel(tied=True)
    optimizer = forge.attach(model, lr=1e-3, clip_grad_norm=1.0)
    before = live.storages(live.tensors())
    model(live.ids(0)).backward()
    assert not live.resident(before, LARGE)
    optimizer.step()


def test_the_walk_names_what_an_ordinary_step_holds():
    model = live.LanguageModel(tied=False, fused=False)
    before = live.storages(live.tensors())
    with live.Allocated(before, LARGE) as allocated:
        model(live.ids(0)).backward()
    found = live.resident(before, LARGE)
    assert f"a gradient [{live.VOCABULARY}, {live.WIDTH}] {torch.float32}" in found
    assert len(found) == 4
    assert any(f"[{live.TOKENS}, {live.VOCABULARY}]" in name for name in allocated.large)


@pytest.mark.parametrize("recipe", [None, "bf16-state"])
def test_loading_a_checkpoint_makes_nothing_of_the_order_of_a_state(recipe):  # field log row 131
    model = live.LanguageModel(tied=True)
    optimizer = forge.attach(model, lr=1e-3, recipe=recipe)
    model(live.ids(0)).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = live.storages(live.tensors())
    with live.Allocated(before, LARGE) as allocated:
        optimizer.load_state_dict(saved)
    assert not live.resident(before, LARGE)
    assert not allocated.large
    places = {tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()}
    assert places.isdisjoint(tensor.data_ptr() for state in saved["state"].values() for tensor in state.values())
