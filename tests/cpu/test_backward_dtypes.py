"""Weights of every dtype, autocast, and inputs of another dtype."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mean_square, mlp

half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def fp64_adamw(weight, gradient, lr, betas=(0.9, 0.999), eps=1e-8, decay=1e-2):
    """The first AdamW step, by hand."""
    weight, gradient = weight.double(), gradient.double()
    exp_avg, exp_avg_sq = (1 - betas[0]) * gradient, (1 - betas[1]) * gradient.square()
    update = (exp_avg / (1 - betas[0])) / ((exp_avg_sq / (1 - betas[1])).sqrt() + eps)
    return weight * (1 - lr * decay) - lr * update, exp_avg, exp_avg_sq


@backends
@half
@pytest.mark.parametrize("bias", [True, False])
def test_weights_in_half_precision(backend, dtype, bias):
    """One rounding of a fp32 result, so within one unit in the last place of the fp64 step."""
    torch.manual_seed(0)
    layer = nn.Linear(12, 7, bias=bias, dtype=dtype)
    old = layer.weight.detach().clone()
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    x, dy = batch(9, 12).to(dtype).requires_grad_(), batch(9, 7, seed=1).to(dtype)
    y = layer(x)
    assert y.dtype is dtype
    y.backward(dy)
    optimizer.step()
    gradient = dy.double().t() @ x.detach().double()
    weight, exp_avg, exp_avg_sq = fp64_adamw(old, gradient, lr=1e-2)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(layer.weight.double(), weight, rtol=ulp, atol=1e-7)
    state = optimizer.state[layer.weight]
    state_ulp = torch.finfo(state["exp_avg"].dtype).eps
    torch.testing.assert_close(state["exp_avg"].double(), exp_avg, rtol=max(state_ulp, 1e-6), atol=1e-7)
    torch.testing.assert_close(state["exp_avg_sq"].double(), exp_avg_sq, rtol=max(state_ulp, 1e-6), atol=1e-8)
    assert x.grad.dtype is dtype
    torch.testing.assert_close(x.grad.double(), dy.double() @ old.double(), rtol=4 * ulp, atol=4 * ulp)
    if bias:
        assert layer.bias.dtype is dtype
        assert optimizer.state[layer.bias]["step"] == 1


@backends
@pytest.mark.parametrize(
    ("dtype", "recipe", "state"),
    [
        (torch.bfloat16, "fp32-state", torch.float32),
        (torch.float16, "fp32-state", torch.float32),
        (torch.float32, "fp32-state", torch.float32),
        (torch.bfloat16, "bf16-state", torch.bfloat16),
        (torch.float32, "bf16-state", torch.bfloat16),
        (torch.bfloat16, "fp32-master", torch.float32),
        (torch.float16, "fp32-master", torch.float32),
    ],
)
def test_accumulation_is_fp32_for_every_weight_and_state_dtype(backend, dtype, recipe, state):  # field log row 67
    """Two micro-batches whose gradients are 256 and 1: their bf16 sum would be 256."""
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    optimizer = forge.attach(layer, lr=1e-2, recipe=recipe, accumulation_steps=2, backend=backend)
    assert optimizer.state[layer.weight]["exp_avg"].dtype is state
    for gradient in (256.0, 1.0):
        layer(torch.tensor([[gradient]], dtype=dtype)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm == 257.0


@backends
@half
def test_autocast_against_torchs_autocast(backend, dtype):
    """The same forward bit for bit; the weight gradient, which stays in fp32, within its rounding."""
    pair = Pair(mlp(12, 16, 7), backend=backend)
    x = batch(9, 12)

    def loss(model):
        with torch.autocast("cpu", dtype):
            y = model(x)
        assert y.dtype is dtype
        return y.float().square().mean()

    assert torch.equal(loss(pair.model), loss(pair.twin))
    pair.optimizer.zero_grad()
    pair.train(loss)
    for ours, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert ours.dtype is torch.float32
        expected = pair.oracle.state[theirs]["exp_avg"]
        scale = expected.abs().max().item()
        difference = (pair.optimizer.state[ours]["exp_avg"] - expected).abs().max().item()
        assert difference <= 4 * torch.finfo(dtype).eps * scale


@backends
def test_backward_inside_an_autocast_region(backend):
    """torch advises against it; the gradient must not be cast a second time."""
    inside, outside = Pair(mlp(12, 16, 7), backend=backend), Pair(mlp(12, 16, 7), backend=backend)
    x = batch(9, 12)
    with torch.autocast("cpu", torch.bfloat16):
        loss = inside.model(x).float().square().mean()
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = outside.model(x).float().square().mean()
    loss.backward()
    for a, b in zip(inside.model.parameters(), outside.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"clip": 0.05}, {"waiting": True}], ids=["immediate", "clipped", "waiting"])
def test_backward_and_step_inside_an_autocast_region(options):
    """Neither the sums of kept factors nor those of a tied pair are cast; torch's step has no matrix product."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 64), nn.Linear(64, 11, bias=False)
            self.hidden = nn.Linear(64, 64)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.hidden(self.embedding(ids))))

    pair = Pair(Tied(), **options)
    for _ in range(2):
        pair.backward(mean_square(torch.tensor([1, 3, 3, 0, 7])))
        with torch.autocast("cpu", torch.bfloat16):
            pair.close()
    pair.expect_equal()


@backends
def test_autocast_of_bf16_weights(backend):
    torch.manual_seed(0)
    layer = nn.Linear(12, 7, dtype=torch.bfloat16)
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    x = batch(9, 12).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().mean().backward()
    optimizer.step()
    assert x.grad.dtype is torch.float32
    assert optimizer.state[layer.weight]["step"] == 1


def test_autocast_of_a_checkpointed_block():
    pair = Pair(mlp(12, 16, 7))
    x = batch(9, 12).requires_grad_()

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().square().mean()

    pair.train(loss)
    for ours, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        expected = pair.oracle.state[theirs]["exp_avg"]
        difference = (pair.optimizer.state[ours]["exp_avg"] - expected).abs().max()
        assert difference <= 0.04 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_input_of_another_dtype_is_an_error_as_in_torch(dtype):
    layer = nn.Linear(6, 4)
    twin = nn.Linear(6, 4)
    optimizer = forge.attach(layer, lr=1e-2)
    with pytest.raises(RuntimeError, match="same dtype"):
        twin(batch(5, 6).to(dtype))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(batch(5, 6).to(dtype))
    assert optimizer.state[layer.weight]["step"] == 0


def test_autocast_leaves_float64_inputs_alone_as_torch_does():
    layer, twin = nn.Linear(6, 4), nn.Linear(6, 4)
    optimizer = forge.attach(layer, lr=1e-2)
    for module in (layer, twin):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
            module(batch(5, 6).double())
    assert optimizer.owned


def test_a_float64_weight_is_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"^1\.weight: .*float64"):
        forge.attach(model, lr=1e-2)
    assert type(model[0]) is nn.Linear


@backends
def test_mixed_dtypes_in_one_group(backend):
    """Each kernel launch holds one dtype; every parameter counts its own steps."""
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 8)
            self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)
            self.b = nn.Linear(8, 4, dtype=torch.bfloat16)

        def forward(self, x):
            return self.b(self.norm(self.a(x).bfloat16())).float()

    pair = Pair(Mixed(), backend=backend, lr=1e-2)
    x = batch(5, 6)
    for _ in range(3):
        pair.train(mean_square(x))
    for ours, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert ours.dtype is theirs.dtype
        assert pair.optimizer.state[ours]["step"] == 3
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=3e-3)
