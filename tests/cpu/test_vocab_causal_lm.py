"""A Hugging Face causal language model with fused embedding, head and loss, against its own loss and torch.optim."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import forge_megatron as forge
from forge_megatron.vocab import causal_lm_loss, logits

IDS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(IDS % 5 == 0, -100)


def llama(tied, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **sizes, **options))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=["immediate", "clipped"])
def test_steps_equal_torchs(tied, options, monkeypatch):
    monkeypatch.setattr(logits, "BLOCK_LOGITS", 1)
    model = llama(tied)
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, lr=1e-3, eps=1e-6, **options)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3, eps=1e-6)
    for items in (None, 7):
        loss = causal_lm_loss(model, IDS, LABELS, num_items_in_batch=items)
        expected = twin(input_ids=IDS, labels=LABELS, **({} if items is None else {"num_items_in_batch": items})).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        expected.backward()
        if options:
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), options["clip_grad_norm"])
        optimizer.step()
        oracle.step()
        optimizer.zero_grad()
        oracle.zero_grad()
        if options:
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    how = {row.name: row.how for row in optimizer.coverage}
    assert how["model.embed_tokens.weight"] == "fused"
    assert tied or how["lm_head.weight"] == "fused"


def test_logits_that_are_changed_after_the_head_are_refused():
    model = llama(False)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM: config.final_logit_softcapping=30.0 changes"):
        causal_lm_loss(model, IDS, LABELS)
