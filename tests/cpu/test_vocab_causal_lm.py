"""A Hugging Face causal language model with fused embedding, head and loss, against its own loss and torch.optim."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("lm_head_multiplier", 0.5),
        ("logits_soft_cap", 30.0),
        ("z_loss_coefficient", 1e-4),
    ],
)
def test_logits_that_are_changed_after_the_head_are_refused(key, value):
    model = llama(False)
    setattr(model.config, key, value)
    with pytest.raises(NotImplementedError, match=rf"LlamaForCausalLM: config.{key}={value} changes"):
        causal_lm_loss(model, IDS, LABELS)


def recurrent_gemma():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=50, lru_width=16, **sizes))


def bart():
    sizes = {"d_model": 16, "decoder_ffn_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 2}
    return BartForCausalLM(BartConfig(vocab_size=50, **sizes))


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertLMHeadModel(BertConfig(vocab_size=50, is_decoder=True, **sizes))


def with_a_loss_of_its_own():
    model = llama(False)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().square().mean()
    return model


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (recurrent_gemma, r"RecurrentGemmaForCausalLM: config.logits_soft_cap=30.0 changes"),
        (bart, r"BartForCausalLM has a loss of its own \(in its forward\)"),
        (bert, "BertLMHeadModel has a cls beside its base_model and its head"),
        (with_a_loss_of_its_own, r"LlamaForCausalLM has a loss of its own \(<lambda>\)"),
    ],
)
def test_a_model_whose_loss_is_another_is_refused(build, match):
    with pytest.raises(NotImplementedError, match=match):
        causal_lm_loss(build(), IDS, LABELS)
