"""transformers' mixtures of experts, whose experts are one tensor a linear: stepped as torch.optim.AdamW steps them."""

import copy

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)

import forge_megatron as forge
from tests.cpu.training import Pair, backends

SHARED = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def qwen3_moe():
    set_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHARED, moe_intermediate_size=12, num_experts=8))


def mixtral():
    set_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHARED, num_local_experts=4))


def gpt_oss():
    """Weights ``[experts, in, out]``, biases, gate and up rows in turn."""
    set_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SHARED, num_local_experts=4, layer_types=["full_attention"] * 2))
    for name, p in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(p, std=0.05)
    return model


def loss(seed: int):
    """Six tokens, so that of eight experts some have none."""
    ids = torch.randint(1, SHARED["vocab_size"], (1, 6), generator=torch.Generator().manual_seed(seed))
    return lambda model: model(input_ids=ids, labels=ids).loss


def experts_of(pair: Pair) -> set[str]:
    return {row.name for row in pair.optimizer.coverage.rows if row.fused and ".experts." in row.name}


@pytest.mark.parametrize("make", [qwen3_moe, mixtral, gpt_oss])
@backends
def test_experts_are_stepped_by_one_launch_as_torch_steps_them(make, backend):
    both = Pair(make(), backend=backend)
    weights = {f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")}
    assert experts_of(both) == weights
    both.train(loss(1), loss(2), loss(3))
    both.expect_equal()
    for i in range(2):
        assert both.model.model.layers[i].mlp.experts.gate_up_proj.grad is None


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_clipped_accumulated_and_checkpointed(implementation):
    model = qwen3_moe()
    model.set_experts_implementation(implementation)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    both = Pair(model, clip=0.1, accumulation_steps=2)
    for seed in (1, 3):
        both.backward(loss(seed))
        both.backward(loss(seed + 1))
        both.close()
        torch.testing.assert_close(both.optimizer.grad_norm, both.twin_norm, rtol=1e-5, atol=0)
    both.expect_equal()


def test_what_is_not_owned_says_why():
    def reasons(model) -> set[str]:
        rows = forge.attach(model, lr=1e-3).coverage.rows
        return {row.how for row in rows if row.name.endswith(("experts.gate_up_proj", "experts.down_proj"))}

    model = qwen3_moe()
    model.config._experts_implementation = "sonicmoe"
    assert reasons(model) == {"Qwen3MoeExperts multiplies by experts_implementation='sonicmoe'"}
    model = qwen3_moe()
    experts = model.model.layers[0].mlp.experts
    other = type("Own", (type(experts),), {"forward": lambda self, x, index, weights: x})
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = other
    assert reasons(model) == {"Own has a forward of its own"}
    # Its forward multiplies every token with every expert, and asks no such decorator.
    llama4 = Llama4ForCausalLM(Llama4TextConfig(**SHARED, intermediate_size_mlp=24, num_local_experts=2))
    assert reasons(llama4) == {"not the weight of a linear layer or an embedding"}


def test_detached_and_copied_experts_are_transformers_own():
    model = qwen3_moe()
    before = type(model.model.layers[0].mlp.experts)
    optimizer = forge.attach(model, lr=1e-3)
    copied = copy.deepcopy(model.model.layers[0].mlp.experts)
    assert type(copied) is before
    with torch.no_grad():
        attached = loss(1)(model)
    optimizer.detach()
    assert type(model.model.layers[0].mlp.experts) is before
    torch.testing.assert_close(attached, loss(1)(model), rtol=1e-6, atol=1e-6)
    loss(1)(model).backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad is not None
