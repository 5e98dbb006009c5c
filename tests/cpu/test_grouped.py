"""Experts in one tensor are stepped in one launch, those without tokens too, as ``torch.optim`` does."""

import copy

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.oracles_staged import Lamb64, Optimizer64
from tests.cpu.training import Pair, backends, expect_bit_equal, snapshot

EXPERTS, INPUTS, HIDDEN = 3, 20, 36


class Experts(nn.Module):
    """Two linears of experts with a nonlinearity between."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up = forge.GroupedLinear(EXPERTS, INPUTS, HIDDEN, dtype=dtype)
        self.down = forge.GroupedLinear(EXPERTS, HIDDEN, INPUTS, dtype=dtype)

    def forward(self, x, ends):
        return self.down(torch.tanh(self.up(x, ends)), ends)


class Loops(nn.Module):
    """The same by torch's own linear, an expert at a time: the twin."""

    def __init__(self, experts: Experts):
        super().__init__()
        self.up = nn.Parameter(experts.up.weight.detach().clone())
        self.down = nn.Parameter(experts.down.weight.detach().clone())

    def forward(self, x, ends):
        begins = [0, *ends.tolist()]
        parts = []
        for expert in range(EXPERTS):
            own = x[begins[expert] : begins[expert + 1]]
            parts.append(torch.tanh(own @ self.up[expert].t()) @ self.down[expert].t())
        return torch.cat(parts)


def routed(*tokens, seed=0, dtype=torch.float32):
    x = torch.randn(sum(tokens), INPUTS, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    ends = torch.cumsum(torch.tensor(tokens), 0, dtype=torch.int32)
    return lambda model: model(x, ends).square().sum() / 8


def pair(**options):
    model = Experts()
    return Pair(model, twin=Loops(model), **options)


ROUTES = [routed(4, 0, 4, seed=1), routed(0, 7, 1, seed=2), routed(0, 0, 0, seed=3), routed(0, 0, 5, seed=4)]


@backends
def test_experts_without_tokens_are_stepped_with_a_zero_gradient(backend):
    """Field log row 61: splits [4, 0, 4], another empty group in the next step; row 59: no tokens at all."""
    both = pair(backend=backend, weight_decay=0.1)
    assert all(row.fused for row in both.optimizer.coverage.rows)
    for route in ROUTES:
        both.train(route)
    assert all(p.grad is None for p in both.model.parameters())
    assert all(f"{backend} at 5 tokens" in row.kernel for row in both.optimizer.coverage.rows)
    both.expect_equal()


@backends
@pytest.mark.parametrize("options", [{"clip": 0.05}, {"accumulation_steps": 6}], ids=["clipped", "accumulated"])
def test_waiting_experts(backend, options):
    """More uses than a launch takes, an empty micro-batch, and a norm that counts every expert once."""
    both = pair(backend=backend, **options)
    windows = [ROUTES, [*ROUTES, ROUTES[1], ROUTES[0]]]
    for window in [[route] for route in ROUTES] if "clip" in options else windows[1:]:
        for route in window:
            both.backward(route)
        both.close()
        if both.clip is not None:
            torch.testing.assert_close(both.optimizer.grad_norm, both.twin_norm, rtol=1e-5, atol=1e-7)
    both.expect_equal()


@backends
def test_lion(backend):
    both = pair(backend=backend, rule="lion")
    both.train(*ROUTES[:2])
    both.expect_equal()


@backends
def test_a_rule_of_whole_tensors_sees_the_experts_as_the_one_tensor_that_they_are(backend):
    model = Experts()
    twin = Loops(model)
    optimizer = forge.attach(model, "lamb", lr=1e-2, weight_decay=0.1, backend=backend)
    oracle = Optimizer64(twin.parameters(), lambda _: Lamb64(lr=1e-2, weight_decay=0.1))
    for route in ROUTES[:2]:
        for one, steps in ((model, optimizer), (twin, oracle)):
            route(one).backward()
            steps.step()
            steps.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", ["bf16-state", "fp32-master", "sr-store", "int8", "fp8"])
def test_formats_step_alike_on_both_backends_and_from_a_gradient(recipe):
    """One expert after another, one launch, and a step from ``.grad`` store the same numbers."""
    model = Experts(torch.bfloat16)
    copies = {way: copy.deepcopy(model) for way in ("reference", "triton", "plain")}
    grad = {}
    for way, one in copies.items():
        backend = "reference" if way == "plain" else way
        optimizer = forge.attach(one, lr=1e-2, recipe=recipe, backend=backend)
        if way == "plain":
            optimizer.detach()
            optimizer = forge.ForgeOptimizer(one.named_parameters(), lr=1e-2, recipe=recipe, backend=backend)
        routed(4, 0, 4, dtype=torch.bfloat16)(one).backward()
        optimizer.step()
        grad[way] = [p.detach().float() for p in one.parameters()]
    # A tile's sum may round a bf16 weight the other way: one unit in the last place of numbers below 1/4.
    for other in ("triton", "plain"):
        for a, b in zip(grad["reference"], grad[other], strict=True):
            assert ((a - b).abs() <= 2**-10).all()
            assert (a == b).float().mean() > 0.97
    empty = slice(1, 2)
    for p, old in zip(grad["triton"], model.parameters(), strict=True):
        # Without a gradient, AdamW decays by lr * weight_decay = 1e-4.
        assert ((p[empty] - old[empty].float()).abs() <= 2**-10).all()


@backends
def test_a_gradient_that_is_not_finite_skips_the_whole_step(backend):
    model = Experts()
    optimizer = forge.attach(model, lr=1e-2, skip="atomic", backend=backend)
    before = snapshot(model, optimizer)
    (routed(4, 0, 4)(model) * float("inf")).backward()
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))


def test_tokens_of_one_expert_do_not_reach_another():
    """One expert's infinite gradient leaves the other experts' coordinates to be stepped."""
    model = Experts()
    optimizer = forge.attach(model, lr=1e-2, backend="triton")
    x, ends = torch.randn(8, INPUTS), torch.tensor([4, 4, 8], dtype=torch.int32)
    before = model.down.weight.detach().clone()
    weights = torch.ones(8, 1)
    weights[0] = float("nan")
    (model(x, ends) * weights).sum().backward()
    optimizer.step()
    assert torch.equal(model.down.weight[0], before[0])
    assert torch.isfinite(model.down.weight).all()
    assert not (model.down.weight[2] == before[2]).any()


def test_step_count_and_state_agree_with_torch_where_every_call_is_empty():
    both = pair(weight_decay=0.1)
    both.train(ROUTES[0], ROUTES[2])
    assert [float(s["step"]) for s in both.optimizer.state.values()] == [2.0, 2.0]
    both.expect_equal()


def test_a_foreign_operand_is_named_before_anything_changes():
    model = Experts()
    optimizer = forge.attach(model, lr=1e-2)
    before = snapshot(model, optimizer)
    x = torch.randn(8, INPUTS)
    with pytest.raises(ValueError, match=r"ends is \[3\] torch.int64"):
        model(x, torch.tensor([4, 4, 8]))
    with pytest.raises(ValueError, match="last of ends is 7, and there are 8"):
        model(x, torch.tensor([4, 4, 7], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"input is \[8, 5\]"):
        model(x[:, :5], torch.tensor([4, 4, 8], dtype=torch.int32))
    with pytest.raises(ValueError, match="experts=0"):
        forge.GroupedLinear(0, 4, 4)
    expect_bit_equal(before, snapshot(model, optimizer))


def test_weights_frozen_paused_or_detached_are_ordinary():
    model = Experts()
    optimizer = forge.attach(model, lr=1e-2)
    before = snapshot(model, optimizer)
    with torch.no_grad():
        ROUTES[0](model)
    with optimizer.paused():
        ROUTES[0](model)
    expect_bit_equal(before, snapshot(model, optimizer))
    optimizer.detach()
    ROUTES[0](model).backward()
    assert type(model.up) is forge.GroupedLinear
    assert model.up.weight.grad is not None


def test_what_is_not_owned_says_why():
    class Own(forge.GroupedLinear):
        def forward(self, input, ends):
            return super().forward(input, ends)

    model = nn.ModuleDict({"own": Own(2, 4, 4), "strided": forge.GroupedLinear(2, 4, 4)})
    model["strided"].weight = nn.Parameter(torch.randn(2, 4, 4).transpose(1, 2))
    reasons = [row.how for row in forge.attach(model, lr=1e-2).coverage.rows]
    assert reasons == ["Own has a forward of its own", "experts in one tensor, which is not contiguous"]
