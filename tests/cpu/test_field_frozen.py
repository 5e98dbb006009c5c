"""Frozen and unused parameters in public faults."""

import copy

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import kernels
from tests.cpu.training import Pair, backends, batch, mean_square, mlp


@pytest.fixture
def launches(monkeypatch):
    """The weights whose gradient GEMM was launched, in order."""
    seen = []
    for name in ("wgrad_step", "wgrad_steps", "wgrad_accumulate", "wgrad_norms_sq"):
        real = getattr(kernels, name)

        def spy(first, *args, real=real, name=name, **kwargs):
            seen.append((name, first))
            return real(first, *args, **kwargs)

        monkeypatch.setattr(kernels, name, spy)
    return seen


@backends
def test_the_second_of_four_layers_is_frozen(backend, launches):  # field log rows 41, 54
    model = mlp(6, 7, 8, 5, 4)
    frozen = model[2]
    frozen.requires_grad_(False)
    before = frozen.weight.detach().clone()
    pair = Pair(model, backend=backend)
    x, twin_x = (batch(5, 6).requires_grad_() for _ in range(2))
    for _ in range(3):
        pair.model(x).square().mean().backward()
        pair.twin(twin_x).square().mean().backward()
        pair.close()
    pair.expect_equal()
    torch.testing.assert_close(x.grad, twin_x.grad, rtol=0, atol=1e-6)
    assert torch.equal(frozen.weight, before)
    assert frozen.weight.grad is None
    assert frozen.weight not in pair.optimizer.state
    assert frozen.bias not in pair.optimizer.state
    stepped = [slot.weight for name, slot in launches if name == "wgrad_step"]
    assert len(stepped) == 3 * 3
    assert all(weight is not frozen.weight for weight in stepped)


@backends
def test_a_frozen_layer_costs_no_gemm_while_everything_waits(backend, launches):  # field log row 54
    model = mlp(6, 8, 4)
    model[0].weight.requires_grad_(False)
    optimizer = forge.attach(model, lr=1e-3, clip_grad_norm=0.1, backend=backend)
    model(batch(5, 6)).square().mean().backward()
    assert not optimizer.owned[model[0].weight].factors
    optimizer.step()
    stepped = [slot.name for name, slots in launches if name == "wgrad_steps" for slot in slots]
    assert stepped == ["2.weight"]
    assert [len(measured) for name, measured in launches if name == "wgrad_norms_sq"] == [1]


@backends
def test_each_weights_gradient_is_formed_once_a_micro_batch(backend, launches):
    """Immediate: one launch a layer. Clipped: one for the norm and one for the step, and one backward."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3, backend=backend)
    calls = {"forward": 0, "backward": 0}
    model[0].register_forward_hook(lambda *_: calls.__setitem__("forward", calls["forward"] + 1))
    model[2].register_full_backward_hook(lambda *_: calls.__setitem__("backward", calls["backward"] + 1))
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    assert [name for name, _ in launches] == ["wgrad_step"] * 2
    assert calls == {"forward": 1, "backward": 1}


@backends
def test_frozen_for_two_steps_then_trained_for_two_then_frozen(backend):  # field log row 44
    model = mlp(6, 8, 4)
    pair = Pair(model, backend=backend)
    x = batch(5, 6)
    for trainable in (False, False, True, True, False):
        for side, _ in pair.sides():
            side[0].weight.requires_grad_(trainable)
        kept = [t.clone() for t in pair.optimizer.state.get(pair.model[0].weight, {}).values()]
        pair.train(mean_square(x))
        if not trainable:
            now = pair.optimizer.state.get(pair.model[0].weight, {}).values()
            assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 2


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branch = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, branch):
        h = self.trunk(x)
        return h + self.branch(h) if branch else h


@backends
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}], ids=["immediate", "clipped"])
def test_a_branch_that_the_first_step_skips(backend, options):  # field log row 48
    pair = Pair(Branches(), backend=backend, weight_decay=0.1, **options)
    x = batch(5, 6)
    before = pair.model.branch.weight.detach().clone()
    pair.train(lambda model: model(x, False).square().mean())
    assert torch.equal(pair.model.branch.weight, before)
    assert pair.optimizer.state[pair.model.branch.weight]["step"] == 0
    pair.train(lambda model: model(x, True).square().mean())
    pair.train(lambda model: model(x, False).square().mean())
    pair.expect_equal()
    assert pair.optimizer.state[pair.model.branch.weight]["step"] == 1
    assert pair.optimizer.state[pair.model.trunk.weight]["step"] == 3


@backends
def test_a_branch_that_is_computed_and_not_used(backend):
    """Its forward ran, its output reached no loss: no gradient, no decay, no step, as in torch."""
    pair = Pair(Branches(), backend=backend, weight_decay=0.1)
    x = batch(5, 6)

    def loss(model):
        h = model.trunk(x)
        unused = model.branch(h)
        assert unused.shape == h.shape
        return h.square().mean()

    for _ in range(3):
        pair.train(loss)
    pair.expect_equal()
    assert pair.optimizer.state[pair.model.branch.weight]["step"] == 0


@backends
def test_every_parameter_counts_its_own_steps(backend):  # field log row 50
    """fp32 and bf16 in one group; one of each has a gradient on odd steps only."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.c = nn.Linear(6, 6, dtype=torch.bfloat16)
            self.d = nn.Linear(6, 6, dtype=torch.bfloat16)

        def forward(self, x, odd):
            y = self.a(x).square().sum() + self.c(x.bfloat16()).float().square().sum()
            return y + self.b(x).square().sum() + self.d(x.bfloat16()).float().square().sum() if odd else y

    pair = Pair(Model(), backend=backend)
    for step in range(1, 7):
        x = batch(5, 6, seed=step)
        pair.train(lambda model, x=x, step=step: model(x, step % 2 == 1))
    counts = {name: int(pair.optimizer.state[p]["step"]) for name, p in pair.model.named_parameters()}
    assert counts == {f"{m}.{k}": n for m, n in (("a", 6), ("b", 3), ("c", 6), ("d", 3)) for k in ("weight", "bias")}
    for name, ours, theirs in zip(counts, pair.model.parameters(), pair.twin.parameters(), strict=True):
        # torch rounds bf16 between the parts of a step, and sums bf16 gradients; ours rounds once.
        atol = 1e-6 if ours.dtype is torch.float32 else 8e-3
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class Quantised(nn.Linear):
    """A frozen base of codes with a scale, which it multiplies by as its library does, under a low-rank adapter."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__(width, width, bias=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.weight = nn.Parameter((self.weight.detach() * 100).to(dtype), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) / 100).T + self.up(self.down(x))


@pytest.mark.parametrize("recipe", [None, "fp8-weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_adapters_over_a_frozen_base_of_another_dtype(dtype, recipe):
    torch.manual_seed(0)
    model = nn.Sequential(Quantised(8, dtype), nn.Tanh(), Quantised(8, dtype))
    codes = (torch.arange(64).view(8, 8) % 3).to(dtype)
    for layer in (model[0], model[2]):
        layer.weight.data = codes.clone()
    twin = copy.deepcopy(model)
    optimizer = forge.attach(model, lr=1e-2, recipe=recipe)
    reference = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        for net, stepper in ((model, optimizer), (twin, reference)):
            losses.append(net(torch.ones(4, 8)).square().mean())
            losses[-1].backward()
            stepper.step()
            stepper.zero_grad()
    assert all(torch.equal(layer.weight, codes) for layer in (model[0], model[2]))
    assert [row.how for row in optimizer.coverage if row.name == "0.weight"] == ["frozen"]
    if recipe is None:
        torch.testing.assert_close(losses[0::2], losses[1::2], rtol=1e-6, atol=0)
    assert losses[4] < losses[2] < losses[0]
    resumed = forge.attach(copy.deepcopy(model), lr=1e-2, recipe=recipe)
    resumed.load_state_dict(optimizer.state_dict())
    assert len(resumed.state) == len(optimizer.state) == 4
