"""Public faults of clipping, accumulation and token weighting, each with its values, fused and on the fallback.

The fallback is a weight that something reads without calling its module, and so is stepped from ``.grad``.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels
from tests.cpu import oracles
from tests.cpu.training import backends, batch, expect_bit_equal, mlp

paths = pytest.mark.parametrize(
    "call", [nn.Linear.__call__, lambda layer, x: F.linear(x, layer.weight)], ids=["fused", "fallback"]
)


def scalar(backend: str, rule: str = "adamw", dtype=torch.float32, **options):
    """One weight, 0, and its optimizer."""
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.zeros_(layer.weight)
    return layer, forge.attach(layer, rule, lr=1e-2, weight_decay=0.0, backend=backend, **options)


class Calls(nn.Module):
    """A linear that is called, or whose weight is read past it."""

    def __init__(self, layer: nn.Linear, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


@backends
@paths
def test_with_clipping_every_module_runs_once(backend, call, monkeypatch):  # field log row 4
    """One forward and one backward a module; each weight's norm is taken once, and each is stepped once."""
    layers = [Calls(layer, call) for layer in mlp(6, 8, 8, 4, bias=False)[::2]]
    model = nn.Sequential(*layers)
    optimizer = forge.attach(model, lr=1e-3, clip_grad_norm=0.1, backend=backend)
    calls = dict.fromkeys(("forward", "backward"), 0)

    def counted(key):
        def counting(*_):
            calls[key] += 1

        return counting

    for layer in layers:
        layer.register_forward_hook(counted("forward"))
        layer.register_full_backward_hook(counted("backward"))
    measured, stepped = [], []
    for name, found in (("wgrad_norms_sq", measured), ("wgrad_steps", stepped), ("step", stepped)):
        operation = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda of, *a, do=operation, into=found, **k: (into.extend(of), do(of, *a, **k))
        )
    for _ in range(2):
        x = batch(5, 6).requires_grad_()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fused = call is nn.Linear.__call__
    assert calls == {"forward": 6, "backward": 6}
    assert len(measured) == (6 if fused else 0)
    assert sorted(slot.name for slot in stepped) == sorted(2 * [f"{i}.layer.weight" for i in range(3)])
    assert all(row.fused == fused for row in optimizer.coverage)


@backends
@paths
def test_four_micro_batches_by_hand(backend, call):  # field log rows 11, 14, 16
    layer, optimizer = scalar(backend, accumulation_steps=4)
    for gradient in (1.0, 2.0, 3.0, 6.0):
        (call(layer, torch.tensor([[gradient]])).sum() / 4).backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["step"] == 1
    assert abs(state["exp_avg"].item() - 0.30) < 1e-6
    assert abs(state["exp_avg_sq"].item() - 0.009) < 1e-8
    assert abs(layer.weight.item() + 0.01) < 1e-7


@backends
@paths
def test_micro_batches_of_bf16_weights_are_summed_in_fp32(backend, call):  # field log row 20
    """bf16 has no 257: a sum in it stays at 256, for one more gradient of 1 and for any number of them."""
    layer, optimizer = scalar(backend, dtype=torch.bfloat16, accumulation_steps=None, recipe="fp32-state")
    for gradient in (256.0, 1.0):
        call(layer, torch.tensor([[gradient]], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.grad_norm == 257.0
    # The interpreter takes 15 ms for each; bf16 would stall at 256 all the same.
    count = 1000 if backend == "reference" else 300
    for _ in range(count):
        call(layer, torch.tensor([[1.0]], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm == count


def test_a_detached_models_gradients_have_its_dtype_again():
    layer, optimizer = scalar("reference", dtype=torch.bfloat16, accumulation_steps=2)
    optimizer.detach()
    layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("chunk", [512, 64])
@paths
def test_a_heads_gradient_by_chunks_is_that_of_one_gemm(call, chunk):  # field log row 21
    """8192 tokens in bf16; the error against fp64 does not grow with the number of chunks.

    With 50,257 rows of 256 in ``tests/gpu/test_field_gpu.py``.
    """
    torch.manual_seed(0)
    head = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    optimizer = forge.attach(head, lr=1e-3, accumulation_steps=None, recipe="fp32-state", weight_decay=0.0)
    x, dy = (batch(8192, width, seed=width).bfloat16() for width in (64, 256))
    for part, slope in zip(x.split(chunk), dy.split(chunk), strict=True):
        call(head, part).backward(slope)
    optimizer.step()
    wanted = oracles.wgrad([(dy, x)], shape=head.weight.shape)
    gradient = optimizer.state[head.weight]["exp_avg"].double() / 0.1
    assert (gradient - wanted).norm() <= 4e-3 * wanted.norm()


@backends
@paths
def test_the_token_count_of_a_window_comes_late(backend, call):  # field log row 22
    """10 tokens of gradient 1 and 990 of gradient 0: 0.01, where a mean of means gives 0.5."""
    layer, optimizer = scalar(backend, waiting=True, accumulation_steps=None)
    tokens = 0
    for count, gradient in ((10, 1.0), (990, 0.0)):
        call(layer, torch.full((count, 1), gradient)).sum().backward()
        tokens += count
    optimizer.step(gradient_multiplier=1 / tokens)
    assert abs(optimizer.state[layer.weight]["exp_avg"].item() - 0.1 * 0.01) < 1e-9
    assert abs(optimizer.grad_norm.item() - 0.01) < 1e-8


@backends
@paths
@pytest.mark.parametrize("skip", ["flag", "atomic"])
def test_a_late_scale_of_zero_is_a_step_and_of_nan_is_none(backend, call, skip):
    """As torch's of such a gradient: with 0 the weight decays; a tensor that is NaN is not read, and changes no bit."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = forge.attach(layer, lr=0.1, weight_decay=0.5, waiting=True, skip=skip, backend=backend)
    for scale, weight in ((torch.tensor(float("nan")), 1.0), (0.0, 0.95)):
        call(layer, torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step(gradient_multiplier=scale)
        optimizer.zero_grad()
        torch.testing.assert_close(layer.weight.detach(), torch.full((1, 2), weight), rtol=0, atol=1e-7)
        assert not optimizer.state[layer.weight]["exp_avg"].any()
    assert optimizer.skipped_steps == 1


@backends
@paths
def test_clipping_by_hand(backend, call):  # field log row 1
    for rule in ("sgd", "adamw"):
        layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(layer.weight)
        optimizer = forge.attach(layer, rule, lr=1.0, clip_grad_norm=1.0, backend=backend)
        call(layer, torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
        assert optimizer.grad_norm == 5.0
        if rule == "sgd":
            wanted = torch.tensor([[-0.5999999, -0.7999998]])
            torch.testing.assert_close(layer.weight.detach(), wanted, rtol=0, atol=1e-7)
        else:
            exp_avg = optimizer.state[layer.weight]["exp_avg"]
            torch.testing.assert_close(exp_avg, torch.tensor([[0.06, 0.08]]), rtol=0, atol=1e-6)


@backends
@paths
@pytest.mark.parametrize("clip", [None, float("inf")])
def test_no_clipping_has_the_bits_of_an_optimizer_that_was_not_told(backend, call, clip):  # field log row 3
    results = []
    for options in ({}, {"clip_grad_norm": clip}):
        layer, optimizer = scalar(backend, **options)
        for gradient in (300.0, -2.0):
            call(layer, torch.tensor([[gradient]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([layer.weight.detach(), *optimizer.state[layer.weight].values()])
    expect_bit_equal(*results)


@backends
@paths
def test_a_schedule_counts_real_updates(backend, call):  # field log row 86
    layer, optimizer = scalar(backend, skip="atomic")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1 / (1 + updates))
    for gradient in (1.0, float("nan"), 1.0):
        before = optimizer.skipped_steps
        call(layer, torch.tensor([[gradient]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.skipped_steps == before:
            schedule.step()
    assert schedule.last_epoch == 2 == optimizer.state[layer.weight]["step"]
    # A step of AdamW from equal gradients is lr: 0.01 and then half of it.
    assert abs(layer.weight.item() + 0.015) < 1e-6


@backends
@paths
def test_a_bad_step_between_two_good_ones(backend, call):  # field log rows 10, 88
    """It changes nothing, is counted once, its norm is not a number, and its parameter is named."""
    layer, optimizer = scalar(backend, skip="atomic")
    seen = []
    optimizer.on_skip(seen.append)
    for gradient in (1.0, float("nan"), 1.0):
        call(layer, torch.tensor([[gradient]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if gradient != gradient:
            assert optimizer.grad_norm.isnan()
    state = optimizer.state[layer.weight]
    assert state["step"] == 2
    assert abs(state["exp_avg"].item() - 0.19) < 1e-6
    assert optimizer.skipped_steps == 1
    assert [skip.names for skip in seen] == [("weight",)]


@backends
@paths
def test_the_loss_scale_is_out_before_the_update(backend, call):  # field log row 85
    """SGD, whose step is as large as its gradient: -0.01 and not -0.01 × 2**16. One of five overflows."""
    layer, optimizer = scalar(backend, "sgd", waiting=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for gradient in (1.0, 0.5, float("inf"), 2.0, -1.0):
        scaler.scale(call(layer, torch.tensor([[gradient]])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert abs(layer.weight.item() + 0.025) < 1e-8
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 2.0**15
