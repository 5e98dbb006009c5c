"""What the CPU cannot show of waiting steps: a flag that arrives late, no synchronisation, Gram matrices in bf16."""

import copy
import math

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels
from forge_megatron.kernels import triton_norms
from forge_megatron.kernels.gram import gram_norm_sq


@pytest.fixture
def no_synchronisation():
    """torch raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def model_on_gpu() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)).cuda()


def batch_on_gpu(seed: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).cuda()


def test_an_atomic_skip_waits_for_nothing_and_is_counted(no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")
    model = model_on_gpu()
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    twin, inputs = copy.deepcopy(model), [batch_on_gpu(seed) for seed in range(4)]
    bad = torch.tensor(math.nan).cuda()
    torch.cuda.set_sync_debug_mode("error")
    for index, x in enumerate(inputs):
        loss = model(x).square().mean()
        (loss * bad if index == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 1
    assert all(state["step"] == 3 for state in optimizer.state.values())
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for index in (0, 2, 3):
        twin(inputs[index]).square().mean().backward()
        oracle.step()
        oracle.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_grad_scaler_under_fp16_autocast():
    sides = [model_on_gpu(), model_on_gpu()]
    optimizers = [
        forge.attach(sides[0], lr=1e-3, skip="atomic"),
        torch.optim.AdamW(sides[1].parameters(), lr=1e-3),
    ]
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**30) for _ in sides]
    for seed in range(20):
        for model, optimizer, scaler in zip(sides, optimizers, scalers, strict=True):
            with torch.autocast("cuda", torch.float16):
                loss = model(batch_on_gpu(seed)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**30
    assert 0 < optimizers[0].skipped_steps < 20
    for ours, theirs in zip(*(side.parameters() for side in sides), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("tokens", [64, 512])
@pytest.mark.parametrize("common", [0.0, 3.0], ids=["independent", "correlated"])
def test_gram_matrices_are_right_where_they_are_sure(tokens, common):
    dy, x = factors(tokens, common, torch.float32)
    exact = (dy.double().t() @ x.double()).square().sum()
    norm_sq, sure = gram_norm_sq([(dy, x)])
    assert sure or tokens == 512
    if sure:
        assert abs(norm_sq - exact) <= 1e-5 * exact


def factors(tokens, common, dtype, rows=2048, columns=2048):
    generator = torch.Generator().manual_seed(tokens)
    dy = torch.randn(tokens, rows, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) + common * torch.randn(1, columns, generator=generator)
    return dy.cuda().to(dtype), x.cuda().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formed", [False, True], ids=["gram", "formed"])
def test_many_norms_at_once(dtype, formed, monkeypatch):
    """Both ways, and what is cancelled from one to the other by the kernels themselves."""
    monkeypatch.setattr(triton_norms, "grams_norm_us", lambda *_: 0.0)
    monkeypatch.setattr(triton_norms, "formed_norm_us", lambda *_: -1.0 if formed else 1.0)
    sizes = [(64, 2048, 2048), (500, 1024, 4096), (129, 4096, 520), (1, 16, 8), (1000, 2048, 14336), (300, 8, 24)]
    given = [[factors(t, common, dtype, *size)] for t, *size in sizes for common in (0.0, 3.0)]
    given.append([factors(t, 0.0, dtype, 1024, 512) for t in (100, 7, 300, 1)])
    dy, x = factors(32, 0.0, dtype, 512, 256)
    given.append([(torch.cat([dy, -dy]), torch.cat([x, x]))])
    exact = [sum(dy.double().t() @ x.double() for dy, x in segments).square().sum().item() for segments in given]
    outs = [torch.full((), 7.0, device="cuda", dtype=torch.float64) for _ in given]
    shapes = [torch.Size((dy.shape[1], x.shape[1])) for [(dy, x), *_] in given]
    kernels.wgrad_norms_sq(given, outs, accumulators=[None] * len(outs), shapes=shapes)
    for out, right in zip(outs, exact, strict=True):
        assert out.item() == pytest.approx(right, rel=1e-5, abs=1e-3)
    first = torch.stack(outs)
    kernels.wgrad_norms_sq(given, outs, accumulators=[None] * len(outs), shapes=shapes)
    assert torch.equal(torch.stack(outs), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(136, 1040), (2048, 2048), (8192, 5120), (131, 77)])
def test_a_sum_has_one_rounding_whichever_kernel_adds(shape, dtype):
    # Whole numbers, whose sums are exact in fp32 in any order.
    def whole(*extents, largest=3):
        return torch.randint(-largest, largest + 1, extents, device="cuda").to(torch.bfloat16)

    torch.manual_seed(3)
    total = whole(*shape, largest=100).to(dtype)
    want = total.double()
    for tokens in (64, 200):
        dy, x = whole(tokens, shape[0]), whole(tokens, shape[1])
        want = (want + dy.double().t() @ x.double()).to(dtype).double()
        kernels.wgrad_accumulate([(dy, x)], total)
    assert torch.equal(total.double(), want)
