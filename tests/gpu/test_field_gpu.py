"""Public faults whose values are too large for the CPU's tests."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge

VOCABULARY, WIDTH, TOKENS, CHUNK = 50257, 256, 8192, 512

WAYS = {
    "fused": nn.Linear.__call__,
    "fallback": lambda head, x: F.linear(x, head.weight),
}


def error(head: nn.Linear, optimizer, wanted: torch.Tensor) -> float:
    """Of the gradient, read off AdamW's first moment after its first step."""
    gradient = optimizer.state[head.weight]["exp_avg"].double() / 0.1
    return ((gradient - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chunk", [TOKENS, CHUNK, 64])
def test_a_heads_gradient_by_chunks_is_that_of_one_gemm(how, chunk):  # field log row 21
    """8192 tokens of a head of 50,257 rows in bf16: no worse than a GEMM, however many chunks it came in."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cuda")
    optimizer = forge.attach(head, lr=1e-3, accumulation_steps=None, recipe="fp32-state", weight_decay=0.0)
    x = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()
    dy = torch.randn(TOKENS, VOCABULARY, device="cuda").bfloat16()
    for part, slope in zip(x.split(chunk), dy.split(chunk), strict=True):
        WAYS[how](head, part).backward(slope)
    optimizer.step()
    assert error(head, optimizer, dy.double().t() @ x.double()) <= 4e-3


@pytest.mark.parametrize("chunk", [TOKENS, CHUNK])
def test_a_head_with_its_loss_sums_chunks_in_fp32(chunk):  # field log row 21
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16, device="cuda")
    weight = head.weight.detach().double()
    optimizer = forge.attach(head, lr=1e-3, accumulation_steps=None, recipe="fp32-state", weight_decay=0.0)
    x = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    for part, wanted in zip(x.split(chunk), targets.split(chunk), strict=True):
        (forge.vocab.linear_cross_entropy(part, head, wanted, reduction="sum") / TOKENS).backward()
    optimizer.step()
    expected = torch.zeros_like(weight)
    for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
        slope = torch.softmax(part.double() @ weight.t(), dim=1)
        slope[torch.arange(len(wanted)), wanted] -= 1
        expected += slope.t() @ part.double() / TOKENS
    assert error(head, optimizer, expected) <= 4e-3
