"""Exact global-norm clipping: one coefficient for every parameter, from a norm over all of them."""

import gc
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def fp64_norm(model: nn.Module, loss) -> float:
    """The gradient norm of a float64 copy."""
    import copy

    twin = copy.deepcopy(model).double()
    loss(twin).backward()
    return math.sqrt(sum(p.grad.square().sum().item() for p in twin.parameters()))


@backends
def test_five_steps_of_a_four_layer_mlp(backend):
    pair = Pair(mlp(16, 24, 24, 24, 8), backend=backend, clip=0.1)
    for seed in range(5):
        pair.train(lambda model, seed=seed: model(batch(9, 16, seed=seed)).square().sum())
        assert pair.twin_norm > 0.2
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
def test_one_step_by_sgd_by_hand(backend):  # field log row 1
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = forge.attach(layer, "sgd", lr=1.0, clip_grad_norm=1.0, backend=backend)
    layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert torch.equal(layer.weight, torch.zeros(1, 2))
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[-0.5999999, -0.7999998]]), rtol=0, atol=1e-7)
    assert optimizer.grad_norm == 5.0


@backends
def test_one_step_by_adamw_by_hand(backend):  # field log row 1
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = forge.attach(layer, lr=1.0, clip_grad_norm=1.0, backend=backend)
    layer(torch.tensor([[3.0, 4.0]])).sum().backward()
    optimizer.step()
    exp_avg = optimizer.state[layer.weight]["exp_avg"]
    torch.testing.assert_close(exp_avg, torch.tensor([[0.06, 0.08]]), rtol=0, atol=1e-6)


@backends
def test_the_last_layers_coefficient_depends_on_the_first(backend):  # field log row 2
    """The last layer is the first to finish in backward."""
    pair = Pair(mlp(64, 64, 64, 64, 64), backend=backend, clip=0.1)
    for step in range(3):
        x = batch(8, 64, seed=step)
        pair.backward(lambda model, x=x: (model(x * 10)).square().sum())
        last = pair.model[6].weight
        before = pair.optimizer.state[last]["exp_avg"].clone()
        plain = [p.grad.clone() for p in pair.twin.parameters()]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in plain))
        pair.close()
        gradient = plain[6] * (0.1 / (norm + 1e-6))
        expected = before + (gradient - before) * 0.1
        torch.testing.assert_close(pair.optimizer.state[last]["exp_avg"], expected, rtol=1e-5, atol=1e-8)
        assert abs(pair.optimizer.grad_norm.item() - norm) <= 1e-5 * norm
    pair.expect_equal()


@backends
@pytest.mark.parametrize("clip", [None, math.inf, 1e9])
def test_no_clipping_leaves_no_trace(backend, clip):  # field log row 3
    """None and inf are bit-equal to an optimizer that was never told; a bound that is not reached too."""
    results = []
    for options in ({}, {"clip_grad_norm": clip}):
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2, backend=backend, **options)
        for seed in range(3):
            model(batch(5, 6, seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((snapshot(model, optimizer), optimizer.grad_norm))
    expect_bit_equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "value", [0, 0.0, -1, -0.5, math.nan, "None", "1.0", True, torch.tensor(1.0), -math.inf, 10**400]
)
def test_a_clip_without_a_meaning_is_refused(value):  # field log rows 3, 9
    model = mlp(6, 8, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"clip_grad_norm=.* give a number above 0, or None"):
        forge.attach(model, lr=1e-2, clip_grad_norm=value)
    assert type(model[0]) is nn.Linear
    expect_bit_equal(before, [p.detach() for p in model.parameters()])


@backends
def test_norms_are_those_of_fp64(backend):
    """Immediate mode reads them off the tiles, a clipped step from the factors; both count every parameter."""
    for options in ({}, {"clip_grad_norm": 1e9}, {"waiting": True}):
        model = mlp(33, 65, 17)
        loss = lambda model: model(batch(19, 33).to(next(model.parameters()).dtype)).pow(3).sum()  # noqa: E731
        expected = fp64_norm(model, loss)
        optimizer = forge.attach(model, lr=1e-3, backend=backend, **options)
        loss(model).backward()
        optimizer.step()
        assert abs(optimizer.grad_norm.item() - expected) <= 1e-5 * expected
        assert optimizer.grad_norm.dtype is torch.float32
        assert optimizer.grad_norm.dim() == 0


@backends
@pytest.mark.parametrize("case", ["twice", "tied", "penalty", "accumulated"])
def test_clipping_where_one_weight_has_several_gradients(backend, case):
    """The norm is that of the sum, cross terms included."""
    torch.manual_seed(0)
    x, ids = batch(5, 6), torch.tensor([[1, 4, 4], [0, 9, 2]])

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    losses = {
        "twice": lambda model: model(torch.tanh(model(x))).square().sum(),
        "tied": lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        "penalty": lambda model: model(x).square().sum() + model[0].weight.square().sum(),
        "accumulated": mean_square(x),
    }
    model = Tied() if case == "tied" else mlp(6, 6)
    pair = Pair(model, backend=backend, clip=0.05, accumulation_steps=2 if case == "accumulated" else 1)
    for _ in range(3):
        pair.backward(losses[case])
        if case == "accumulated":
            pair.backward(mean_square(batch(5, 6, seed=4)))
        pair.close()
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
def test_a_gradient_multiplier_comes_before_clipping(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, clip=0.1)
    x = batch(5, 6)
    for scale in (0.01, torch.tensor(100.0), 7):
        pair.backward(mean_square(x))
        for p in pair.twin.parameters():
            p.grad.mul_(scale)
        norm = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1)
        pair.optimizer.step(gradient_multiplier=scale)
        pair.oracle.step()
        pair.optimizer.zero_grad()
        pair.oracle.zero_grad()
        torch.testing.assert_close(pair.optimizer.grad_norm, norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
def test_a_gradient_multiplier_without_clipping(backend):
    """One over the window's token count, which is known only after the last backward."""
    pair = Pair(mlp(6, 8, 4), backend=backend, waiting=True, accumulation_steps=None)
    for window in range(2):
        tokens = 0
        for micro in range(3):
            x = batch(3 + micro, 6, seed=3 * window + micro)
            tokens += len(x)
            pair.backward(lambda model, x=x: model(x).square().sum())
        for p in pair.twin.parameters():
            p.grad.div_(tokens)
        pair.optimizer.step(gradient_multiplier=1 / tokens)
        pair.oracle.step()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in pair.twin.parameters()))
        assert abs(pair.optimizer.grad_norm.item() - norm) <= 1e-5 * norm
        pair.optimizer.zero_grad()
        pair.oracle.zero_grad()
    pair.expect_equal()


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "0.5", True, [0.5], torch.tensor([0.5]), torch.tensor(True)]
)
def test_a_gradient_multiplier_without_a_meaning_is_refused(value):
    pair = Pair(mlp(6, 8, 4), clip=0.1, skip="atomic")
    pair.backward(mean_square(batch(5, 6)))
    before = snapshot(pair.model, pair.optimizer)
    with pytest.raises(ValueError, match=r"gradient_multiplier=.* give a finite number, or a tensor of 0 dimensions"):
        pair.optimizer.step(gradient_multiplier=value)
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.close()
    pair.expect_equal()


def test_a_gradient_multiplier_is_refused_where_weights_are_updated_in_backward():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="attach with waiting=True"):
        optimizer.step(lambda: model(batch(5, 6)).square().mean().backward(), gradient_multiplier=0.5)
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_the_norm_of_frozen_and_unused_parameters_is_zero(backend):  # field log row 43
    model = mlp(6, 8, 8, 4)
    model[2].weight.requires_grad_(False)
    optimizer = forge.attach(model, lr=1e-3, backend=backend, waiting=True)
    for _ in range(2):
        (model[2](torch.tanh(model[0](batch(5, 6)))).square().sum()).backward()
        norms = dict(zip(optimizer.names.values(), optimizer.norms_sq().tolist(), strict=True))
        optimizer.step()
        optimizer.zero_grad()
        assert norms["0.weight"] > 0
        assert norms["2.bias"] > 0
        assert norms["2.weight"] == norms["4.weight"] == norms["4.bias"] == 0
        assert abs(optimizer.grad_norm.item() ** 2 - sum(norms.values())) <= 1e-5 * sum(norms.values())


@backends
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite(backend, bad):
    """A clipped step of a norm that is not finite reports it; finite coordinates follow clip_grad_norm_."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, clip_grad_norm=1.0, backend=backend)
    before = [p.detach().clone() for p in model.parameters()]
    x = batch(5, 6)
    x[0, 0] = bad
    (model(x).sum() + model[2].bias.sum() * bad).backward()
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(t.isfinite().all() for state in optimizer.state.values() for t in state.values())
    assert torch.equal(model[2].bias, before[3])


@backends
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_a_clipped_step_does_where_one_coordinate_is_not_finite(backend, bad):
    """The coefficient is limit / norm: 0 with an infinity, and a decay is left of the step; NaN moves nothing."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = forge.attach(model, lr=0.5, weight_decay=0.5, clip_grad_norm=1.0, backend=backend)
    before = model.weight.detach().clone()
    model(torch.tensor([[bad, 3.0]])).sum().backward()
    optimizer.step()
    kept = 1.0 if math.isnan(bad) else 0.75
    torch.testing.assert_close(model.weight.detach(), before * torch.tensor([[1.0, kept]]), rtol=1e-6, atol=0)
    assert not optimizer.state[model.weight]["exp_avg"].any()
    assert optimizer.state[model.weight]["step"] == 1


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("frozen_base", [False, True], ids=["mlp", "adapters"])
@pytest.mark.parametrize(
    "helper",
    [
        lambda params: nn.utils.clip_grad_norm_(params, 0.1),
        lambda params: nn.utils.clip_grad_norm_(params, math.inf),
        lambda params: clip_grad_norm_(params, max_norm=0.1, norm_type=1.0),
        lambda params: nn.utils.clip_grads_with_norm_(params, 0.1, torch.ones(())),
        lambda params: nn.utils.clip_grad_value_(parameters=params, clip_value=0.1),
    ],
    ids=["norm", "measured", "imported_before", "with_norm", "value"],
)
def test_torchs_clipping_is_refused_by_the_weights_name(waiting, frozen_base, helper):
    """It reads .grad; where every trained weight is owned, nothing else would tell that nothing was clipped."""
    pair = Pair(mlp(6, 8, 4, bias=not frozen_base), waiting=waiting)
    if frozen_base:
        for model, _ in pair.sides():
            model[0].weight.requires_grad_(False)
    pair.backward(mean_square(batch(5, 6)))
    first = "2" if frozen_base else "0"
    with pytest.raises(RuntimeError, match=rf"^{first}\.weight: torch\.nn\.utils clips .*attach\(clip_grad_norm="):
        helper(pair.model.parameters())
    pair.close()
    pair.expect_equal()


def test_torchs_clipping_of_other_models_and_at_other_times_is_left_alone():
    gc.collect()
    original = torch.nn.utils.clip_grad_value_
    model, other = mlp(6, 8, 4), mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2)
    assert inspect.signature(torch.nn.utils.clip_grad_value_) == inspect.signature(original)
    assert clip_grad_norm_(model.parameters(), 1.0) == 0, "nothing is pending"
    model(batch(5, 6)).sum().backward()
    other(batch(5, 6)).sum().backward()
    nn.utils.clip_grad_value_(other.parameters(), 1e-3)
    assert max(p.grad.abs().max() for p in other.parameters()) == torch.tensor(1e-3)
    assert nn.utils.clip_grad_norm_(model[0].bias, 1e9) > 0, "the bias alone has a .grad"
    optimizer.rollback(accept=True)
    optimizer.detach()
    assert torch.nn.utils.clip_grad_value_ is original
    optimizer = forge.attach(model, lr=1e-2)
    assert torch.nn.utils.clip_grad_value_ is not original
    del optimizer
    gc.collect()
    assert torch.nn.utils.clip_grad_value_ is original


class TestChangesOfGrad:
    """Whatever changes .grad would change a part of the model; it is noticed, not skipped in silence."""

    @pytest.mark.parametrize("waiting", [False, True])
    @pytest.mark.parametrize(
        "helper",
        [
            lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
            lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters() if p.grad is not None],
            lambda model: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
        ],
        ids=["in_place", "replaced", "zeroed"],
    )
    def test_a_change_of_grad_after_backward_is_refused(self, waiting, helper):
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2, waiting=waiting)
        model(batch(5, 6)).square().mean().backward()
        before = snapshot(model, optimizer)
        helper(model)
        with pytest.raises(RuntimeError, match=r"bias: its \.grad was changed after backward, but 0\.weight"):
            optimizer.step()
        expect_bit_equal(before, snapshot(model, optimizer))

    def test_the_error_goes_away_with_the_window(self):
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2, waiting=True)
        model(batch(5, 6)).square().mean().backward()
        model[0].bias.grad.mul_(0.1)
        optimizer.zero_grad()
        model(batch(5, 6)).square().mean().backward()
        optimizer.step()
        assert optimizer.state[model[0].weight]["step"] == 1

    def test_a_backward_of_ordinary_parameters_alone_is_not_a_change(self):
        pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Embedding(5, 6)]))
        x = batch(5, 6)
        for _ in range(2):
            pair.backward(lambda model: model[0](x + model[1].weight).square().mean())
            pair.backward(lambda model: model[1].weight.square().sum())
            pair.close()
        pair.expect_equal()

    def test_grad_may_be_read_and_dropped_for_one_parameter(self):
        pair = Pair(mlp(6, 8, 4))
        pair.backward(mean_square(batch(5, 6)))
        for model, _ in pair.sides():
            assert model[0].bias.grad.norm() > 0
            model[0].bias.grad = None
        pair.close()
        pair.expect_equal()
        assert pair.optimizer.state[pair.model[0].bias]["step"] == 0
