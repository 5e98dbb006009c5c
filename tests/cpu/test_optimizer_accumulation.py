"""Exact accumulation: the sum over a window, in fp32, however many micro-batches it has."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
def test_five_steps_of_a_four_layer_mlp(backend, clip):
    pair = Pair(mlp(16, 24, 24, 24, 8), backend=backend, clip=clip, accumulation_steps=3)
    for step in range(5):
        for micro in range(3):
            x = batch(5, 16, seed=3 * step + micro)
            pair.backward(lambda model, x=x: model(x).square().mean() / 3)
        pair.close()
    pair.expect_equal()


@backends
@pytest.mark.parametrize(
    "options", [{"accumulation_steps": 4}, {"accumulation_steps": None}, {"accumulation_steps": 9}]
)
def test_the_mean_of_four_gradients_by_hand(backend, options):  # field log rows 11, 14
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = forge.attach(layer, lr=1e-2, weight_decay=0.0, backend=backend, **options)
    for gradient in (1.0, 2.0, 3.0, 6.0):
        (layer(torch.tensor([[gradient]])).sum() / 4).backward()
        assert layer.weight == 0
    optimizer.step()
    state = optimizer.state[layer.weight]
    assert state["step"] == 1
    assert abs(layer.weight.item() + 0.01) < 1e-7
    assert abs(state["exp_avg"].item() - 0.30) < 1e-6
    assert abs(state["exp_avg_sq"].item() - 0.009) < 1e-8


@backends
def test_the_bias_accumulates_as_the_weight_does(backend):
    layer = nn.Linear(1, 1)
    optimizer = forge.attach(layer, lr=1e-2, weight_decay=0.0, backend=backend, accumulation_steps=4)
    for gradient in (1.0, 2.0, 3.0, 6.0):
        (layer(torch.tensor([[1.0]])).sum() * gradient / 4).backward()
    optimizer.step()
    for p in (layer.weight, layer.bias):
        assert abs(optimizer.state[p]["exp_avg"].item() - 0.30) < 1e-6
        assert abs(optimizer.state[p]["exp_avg_sq"].item() - 0.009) < 1e-8


@backends
def test_windows_of_other_lengths(backend):
    """The last window of an epoch is shorter; what divides the loss is the user's."""
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=4)
    for length in (4, 2, 1, 3):
        for micro in range(length):
            x = batch(5, 6, seed=10 * length + micro)
            pair.backward(lambda model, x=x, length=length: model(x).square().mean() / length)
        pair.close()
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 4


@backends
def test_many_micro_batches_of_random_length_equal_one_batch(backend):  # field log row 12
    pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=None)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (16,), generator=generator).tolist()
    rows = batch(sum(lengths), 6)
    for x in rows.split(lengths):
        pair.model(x).square().sum().backward()
    pair.twin(rows).square().sum().backward()
    pair.close()
    pair.expect_equal()


@backends
@pytest.mark.parametrize("write", ["copy_", "data", "numpy"])
def test_input_buffers_may_be_overwritten_between_micro_batches(backend, write):
    pair = Pair(mlp(32, 24, 16), backend=backend, accumulation_steps=3)
    for _ in range(2):
        buffer = torch.empty(2, 32)
        for micro in range(3):
            value = batch(2, 32, seed=micro)
            if write == "copy_":
                buffer.copy_(value)
            elif write == "data":
                buffer.data.copy_(value)
            else:
                buffer.numpy()[:] = value.numpy()
            pair.backward(mean_square(buffer))
        buffer.fill_(float("nan"))
        pair.close()
    pair.expect_equal()


@backends
def test_an_input_that_requires_grad_may_be_overwritten_too(backend):
    pair = Pair(mlp(32, 24, 16), backend=backend, accumulation_steps=2)
    buffer = torch.zeros(2, 32, requires_grad=True)
    for micro in range(2):
        buffer.data.copy_(batch(2, 32, seed=micro))
        pair.backward(mean_square(buffer))
    buffer.data.fill_(float("nan"))
    pair.close()
    pair.expect_equal()


@backends
@pytest.mark.parametrize("write", ["copy_", "data"])
def test_an_output_gradient_that_the_user_gave_may_be_overwritten(backend, write):
    """A pipeline receives it into a buffer that the next micro-batch reuses."""
    pair = Pair(nn.Linear(32, 16), backend=backend, accumulation_steps=3)
    received = torch.empty(2, 16)
    for micro in range(3):
        target = received if write == "copy_" else received.data
        target.copy_(batch(2, 16, seed=10 + micro))
        for model, _ in pair.sides():
            model(batch(2, 32, seed=micro)).backward(received)
    received.data.fill_(float("nan"))
    pair.close()
    pair.expect_equal()


@pytest.mark.parametrize("write", ["copy_", "data"])
@pytest.mark.parametrize("path", ["addition", "view", "two roots"])
def test_an_output_gradient_that_passed_other_nodes_may_be_overwritten(path, write):
    pair = Pair(nn.Linear(16, 16), accumulation_steps=3)
    received = torch.empty(4, 16)
    for micro in range(3):
        (received if write == "copy_" else received.data).copy_(batch(4, 16, seed=10 + micro))
        x = batch(4, 16, seed=micro)
        for model, _ in pair.sides():
            if path == "two roots":
                torch.autograd.backward([model(x), x + model(-x)], [received, received])
            else:
                y = x + model(x) if path == "addition" else model(x).view(2, 2, 16)
                y.backward(received if path == "addition" else received.view(2, 2, 16))
    received.data.fill_(float("nan"))
    pair.close()
    pair.expect_equal()


def test_an_output_gradient_that_only_backward_held_is_not_copied():
    model = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=2)
    pointers = []
    h = model[0](batch(3, 2, 32))
    a, b = model[1](h), model[2](h)
    for tensor in (a, h):
        tensor.register_hook(lambda gradient: pointers.append(gradient.data_ptr()))
    (h + a + b).square().sum().backward()
    first, second, third = (optimizer.owned[layer.weight].factors.kept[0].dy for layer in model)
    assert second.data_ptr() == third.data_ptr() == pointers[0]
    assert first.data_ptr() == pointers[1]
    model[0](batch(3, 2, 32)).sum().backward()
    assert optimizer.owned[model[0].weight].factors.kept[1].dy.untyped_storage().nbytes() == 4, "expanded"


@backends
def test_a_factor_that_was_overwritten_is_not_folded(backend):
    encoder, layer = nn.Linear(4, 8), nn.Linear(8, 8)
    optimizer = forge.attach(nn.ModuleList([encoder, layer]), lr=1e-2, backend=backend, accumulation_steps=None)
    before = layer.weight.detach().clone()
    hidden = encoder(batch(3, 4))
    layer(hidden).square().sum().backward()
    hidden.detach().zero_()
    with pytest.raises(RuntimeError, match=r"^1\.weight: an activation .* modified in place"):
        layer(encoder(batch(3, 4))).square().sum().backward()
    optimizer.zero_grad()
    assert torch.equal(layer.weight, before)


def test_an_output_gradient_that_a_hook_overwrites_in_the_same_backward_is_refused():
    layer = nn.Linear(4, 8, bias=False)
    optimizer = forge.attach(layer, lr=1e-2)
    before, shared = layer.weight.detach().clone(), torch.zeros(2, 8)
    y, z = layer(batch(2, 4)), layer(batch(2, 4, seed=1))
    for output in (y, z):
        output.register_hook(lambda gradient: shared.copy_(2 * gradient))
    with pytest.raises(RuntimeError, match=r"^weight: an activation or output gradient .* modified in place"):
        (y.square().sum() + 3 * z.sum()).backward()
    assert torch.equal(layer.weight, before)
    assert not optimizer.owned[layer.weight].updated


@backends
def test_an_activation_that_is_overwritten_in_place_after_backward_is_refused(backend):
    model = mlp(32, 24, 16)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, waiting=True)
    hidden = model[1](model[0](batch(2, 32)))
    model[2](hidden).square().mean().backward()
    hidden.detach().zero_()
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match=r"^2\.weight: an activation .* modified in place"):
        optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))


@backends
def test_a_view_of_a_large_buffer_does_not_keep_it_alive(backend):
    layer = nn.Linear(8, 8, bias=False)
    optimizer = forge.attach(layer, lr=1e-3, backend=backend, waiting=True)
    rows = torch.zeros(10_000, 8, requires_grad=True) + batch(10_000, 8)
    layer(rows[5:7]).sum().backward()
    del rows
    gc.collect()
    kept = [pair.x.untyped_storage().nbytes() for pair in optimizer.owned[layer.weight].factors.kept]
    assert kept == [2 * 8 * 4]


@backends
@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 258.0), (torch.bfloat16, 256.0)])
def test_a_sum_in_bf16_is_rounded_with_every_micro_batch(backend, dtype, total):
    # In bf16 256 + 1 is 256; the bias, whose .grad autograd writes, is summed alike.
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    optimizer = forge.attach(
        linear, "sgd", lr=1.0, momentum=0.0, accumulation_steps=3, accumulation_dtype=dtype, backend=backend
    )
    x = torch.zeros(16, 8, dtype=torch.bfloat16)
    x[0] = 1.0
    for value in (256.0, 1.0, 1.0):
        linear(x)[0].mul(value).sum().backward()
    optimizer.step()
    assert optimizer.coverage.rows[0].waits_as == "accumulator"
    assert linear.weight.eq(-total).all()
    assert linear.bias.eq(-total).all()


def test_a_sum_in_bf16_takes_half_of_the_memory_and_is_clipped_alike():
    for weight_dtype, dtype, size in (
        (torch.bfloat16, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 4),
        (torch.float32, torch.bfloat16, 4),
    ):
        torch.manual_seed(0)
        linear = nn.Linear(32, 16, bias=False, dtype=weight_dtype)
        twin = copy.deepcopy(linear)
        options = {"lr": 0.5, "momentum": 0.0, "clip_grad_norm": 1.0}
        optimizer = forge.attach(linear, "sgd", accumulation_steps=4, accumulation_dtype=dtype, **options)
        for micro in range(4):
            x = batch(64, 32, seed=micro).to(weight_dtype)
            linear(x).float().square().sum().backward()
            twin(x).float().square().sum().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        with torch.no_grad():
            twin.weight -= 0.5 * twin.weight.grad
        optimizer.step()
        assert optimizer.coverage.rows[0].waiting_bytes == size * linear.weight.numel()
        # Four sums on either side, each half a unit of bf16 off.
        bound = 0.5 * 2 * 4 * 2**-9 * twin.weight.grad.abs().max().item()
        torch.testing.assert_close(linear.weight, twin.weight, rtol=2**-7, atol=bound)


class TestDiscardingAWindow:  # field log row 26
    @backends
    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("micro_batches", [1, 3], ids=["kept", "folded"])
    def test_optimizer_zero_grad_discards_all_of_it(self, backend, set_to_none, micro_batches):
        pair = Pair(mlp(4, 3), backend=backend, accumulation_steps=None)
        for micro in range(micro_batches):
            pair.backward(mean_square(batch(1, 4, seed=micro)))
        factors = pair.optimizer.owned[pair.model[0].weight].factors
        assert (factors.accumulator is None) == (micro_batches == 1)
        for _, optimizer in pair.sides():
            optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(4):
            pair.backward(mean_square(batch(2, 4, seed=9 + micro)))
        pair.close()
        pair.expect_equal()

    def test_dropping_every_grad_inside_a_window_is_refused(self):
        """It would discard what lies in .grad and keep the factors."""
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2, accumulation_steps=3)
        model(batch(5, 6)).square().mean().backward()
        before = snapshot(model, optimizer)
        for p in model.parameters():
            p.grad = None
        with pytest.raises(RuntimeError, match=r"every \.grad was dropped .* 0\.weight"):
            model(batch(5, 6)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"every \.grad was dropped .* 0\.weight"):
            optimizer.step()
        expect_bit_equal(before, snapshot(model, optimizer))

    def test_zeroing_grad_inside_a_window_is_refused(self):
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2, accumulation_steps=3)
        model(batch(5, 6)).square().mean().backward()
        before = snapshot(model, optimizer)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        with pytest.raises(RuntimeError, match=r"\.grad was changed after backward"):
            model(batch(5, 6)).square().mean().backward()
        expect_bit_equal(before, snapshot(model, optimizer))

    @backends
    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("who", ["model", "optimizer"])
    def test_either_zero_grad_between_windows(self, backend, set_to_none, who):
        pair = Pair(mlp(6, 8, 4), backend=backend, accumulation_steps=2)
        for step in range(3):
            for micro in range(2):
                pair.backward(mean_square(batch(5, 6, seed=2 * step + micro)))
            for model, optimizer in pair.sides():
                optimizer.step()
                (model if who == "model" else optimizer).zero_grad(set_to_none=set_to_none)
        pair.expect_equal()

    @backends
    def test_zero_grad_to_zeros_steps_an_unused_weight_with_a_zero_gradient(self, backend):
        """As torch: a .grad of zeros is a gradient, and decay and momentum apply; None is none."""
        pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), backend=backend, weight_decay=0.1)
        x = batch(5, 6)
        for set_to_none in (False, False, True, False):
            both = not set_to_none
            for model, optimizer in pair.sides():
                loss = model[0](x).square().mean()
                (loss + model[1](x).square().mean() if both else loss).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                model[0](x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        pair.expect_equal()


def test_state_is_not_saved_in_the_middle_of_a_window():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=2)
    model(batch(5, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: a backward is pending; call step\(\) before you save"):
        optimizer.state_dict()
    optimizer.zero_grad()
    optimizer.state_dict()


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
def test_a_number_of_micro_batches_without_a_meaning_is_refused(value):
    with pytest.raises(ValueError, match="accumulation_steps="):
        forge.attach(mlp(6, 4), lr=1e-2, accumulation_steps=value)


@pytest.mark.parametrize("value", [torch.float16, torch.float64, "bf16", None])
def test_a_dtype_of_the_sum_that_no_kernel_writes_is_refused(value):
    with pytest.raises(ValueError, match="accumulation_dtype="):
        forge.attach(mlp(6, 4), lr=1e-2, accumulation_steps=2, accumulation_dtype=value)


def test_a_number_of_micro_batches_from_numpy_is_one():
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=np.int64(2))
    for _ in range(2):
        model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 1
