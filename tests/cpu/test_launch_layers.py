"""The attention and the norms that stand in for Transformer Engine's, against fp64 by hand."""

import types

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from forge_megatron.megatron.attention import ForgeDotProductAttention
from launch.norm import norm_class


def settings(**changes) -> types.SimpleNamespace:
    plain = {
        "attention_dropout": 0.0, "window_size": None, "context_parallel_size": 1, "softmax_type": "vanilla",
        "params_dtype": torch.float32, "sequence_parallel": False,
    }  # fmt: skip
    return types.SimpleNamespace(**{**plain, **changes})


def by_hand(query, key, value, scale):
    """Causal softmax attention in fp64; a query head reads the key of its group."""
    query, key, value = (t.double().permute(1, 2, 0, 3) for t in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
    return context.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention(groups, scale):
    torch.manual_seed(0)
    inputs = [torch.randn(11, 2, heads, 8, requires_grad=True) for heads in (6, groups, groups)]
    layer = ForgeDotProductAttention(settings(), 1, AttnMaskType.causal, "self", softmax_scale=scale)
    ours = layer(*inputs, None)
    theirs = by_hand(*inputs, scale or 8**-0.5)
    assert ours.shape == (11, 2, 48)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weights).sum(), inputs)
    expected = torch.autograd.grad((theirs * weights).sum(), inputs)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "changes", "said"),
    [
        (AttnMaskType.padding, {}, "causal"),
        (AttnMaskType.causal, {"window_size": (8, 0)}, "window_size"),
        (AttnMaskType.causal, {"softmax_type": "learnable"}, "learnable"),
    ],
)
def test_attention_that_it_is_not(mask, changes, said):
    with pytest.raises(ValueError, match=said):
        ForgeDotProductAttention(settings(**changes), 1, mask, "self")


@pytest.mark.parametrize(
    ("kind", "said"),
    [("a2a+p2p", "needs Transformer Engine.*p2p, a2a or all_gather"), ("a2a", "does not divide the 3 attention heads")],
)
def test_kinds_of_context_parallelism_that_it_is_not(kind, said):
    split = settings(context_parallel_size=2, num_attention_heads=6, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match=said):
        ForgeDotProductAttention(split, 1, AttnMaskType.causal, "self", cp_comm_type=kind)


def test_a_mask_is_refused():
    layer = ForgeDotProductAttention(settings(), 1, AttnMaskType.causal, "self")
    states = torch.randn(3, 1, 2, 4)
    with pytest.raises(ValueError, match="no mask"):
        layer(states, states, states, torch.zeros(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_carry_megatrons_mark(name, sequence_parallel):
    norm = norm_class(name)(settings(sequence_parallel=sequence_parallel), 16, eps=1e-3, normalization=name)
    assert {p.sequence_parallel for p in norm.parameters()} == {sequence_parallel}
    x = torch.randn(5, 16) * 1e-2
    centred = x.double() if name == "RMSNorm" else x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_there():
    with pytest.raises(ValueError, match="L2Norm"):
        norm_class("L2Norm")
