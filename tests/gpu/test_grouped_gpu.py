"""What the CPU cannot show of experts in one tensor: torch's grouped product, no synchronisation, many experts."""

import pytest
import torch
from torch import nn

import forge_megatron as forge

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1


class Experts(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int):
        super().__init__()
        torch.manual_seed(0)
        place = {"device": "cuda", "dtype": torch.bfloat16}
        self.up = forge.GroupedLinear(experts, width, hidden, **place)
        self.down = forge.GroupedLinear(experts, hidden, width, **place)

    def forward(self, x, ends):
        return self.down(nn.functional.silu(self.up(x, ends)), ends)


def routed(experts: int, tokens: int, width: int):
    """Every third expert has no token."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(experts, (tokens,), generator=generator)
    counts = torch.bincount(chosen - (chosen % 3 == 1).long(), minlength=experts)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    return x.cuda().requires_grad_(), ends.cuda()


def spans(ends):
    return list(zip([0, *ends.tolist()], ends.tolist(), strict=False))


# The second has rows that are no whole 16 bytes, which torch's grouped product refuses.
@pytest.mark.parametrize("extents", [(64, 4096, 256, 128), (5, 77, 36, 51), (3, 0, 64, 64)], ids=str)
@pytest.mark.parametrize("recipe", ["fp32-state", "bf16-state", "int8"])
def test_one_launch_steps_every_expert_as_fp64_does(extents, recipe):
    experts, tokens, width, hidden = extents
    model = Experts(experts, width, hidden)
    optimizer = forge.attach(model, lr=LR, weight_decay=DECAY, recipe=recipe)
    assert all(row.fused for row in optimizer.coverage.rows)
    before = model.up.weight.detach().double()
    x, ends = routed(experts, tokens, width)
    h = model.up(x, ends)
    dh = torch.randn(tokens, hidden, device="cuda").bfloat16()
    h.backward(dh)
    for expert, (begin, end) in enumerate(spans(ends)):
        own = slice(begin, end)
        torch.testing.assert_close(h[own].double(), x[own].double() @ before[expert].t(), rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(x.grad[own].double(), dh[own].double() @ before[expert], rtol=2**-7, atol=1e-2)
        g = dh[own].double().t() @ x[own].detach().double()
        state = optimizer.state[model.up.weight]
        if recipe != "int8":
            relative = 2**-8 if recipe == "bf16-state" else 1e-5
            torch.testing.assert_close(state["exp_avg"][expert].double(), (1 - BETA1) * g, rtol=relative, atol=1e-5)
        stepped = before[expert] * (1 - LR * DECAY) - LR * g / (g.abs() + EPS)
        # Where g all but vanishes its sign is that of a rounding.
        sure = (g.abs() > 1e-3) | (g == 0)
        torch.testing.assert_close(model.up.weight[expert][sure].double(), stepped[sure], rtol=2**-8, atol=1e-6)


def test_the_host_does_not_wait_for_where_the_tokens_are():
    experts, tokens, width, hidden = 16, 512, 64, 128
    model = Experts(experts, width, hidden)
    optimizer = forge.attach(model, lr=LR, recipe="bf16-state")
    inputs = [routed(experts, tokens, width) for _ in range(3)]
    for number, (x, ends) in enumerate(inputs):
        if number == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, ends).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if number == 2:
                torch.cuda.set_sync_debug_mode("default")
    assert all(state["step"] == 3 for state in optimizer.state.values())
