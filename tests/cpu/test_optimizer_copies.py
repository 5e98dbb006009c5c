"""Copies of an attached model are ordinary models; what is deleted is freed."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.optim.swa_utils import AveragedModel

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


copies = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)


@backends
@copies
@pytest.mark.parametrize("steps", [0, 1])
def test_a_copy_trains_alone(backend, duplicate, steps):  # field log row 81
    pair = Pair(mlp(6, 8, 4), backend=backend)
    x = batch(5, 6)
    for _ in range(steps):
        pair.train(mean_square(x))
    other = duplicate(pair.model)
    assert [type(module) for module in other] == [nn.Linear, nn.Tanh, nn.Linear]
    expect_bit_equal(list(pair.model.state_dict().values()), list(other.state_dict().values()))
    before = snapshot(pair.model, pair.optimizer)
    ordinary = torch.optim.AdamW(other.parameters(), lr=1e-2)
    other(x).square().mean().backward()
    assert all(p.grad is not None for p in other.parameters())
    ordinary.step()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    # The copy can be attached itself, and the original goes on.
    second = forge.attach(other, lr=1e-3, backend=backend)
    second.zero_grad()
    other(x).square().mean().backward()
    second.step()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    pair.train(mean_square(x))
    pair.expect_equal()


@copies
def test_a_copy_in_the_middle_of_a_window(duplicate):
    pair = Pair(mlp(6, 8, 4), accumulation_steps=2)
    pair.backward(mean_square(batch(5, 6)))
    other = duplicate(pair.model)
    other(batch(5, 6)).square().mean().backward()
    pair.backward(mean_square(batch(5, 6, seed=1)))
    pair.close()
    pair.expect_equal()


def test_an_averaged_model(tmp_path):
    pair = Pair(mlp(6, 8, 4))
    averages = [
        AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)) for model, _ in pair.sides()
    ]
    for seed in range(3):
        pair.train(mean_square(batch(5, 6, seed=seed)))
        for average, (model, _) in zip(averages, pair.sides(), strict=True):
            average.update_parameters(model)
    for ours, theirs in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert averages[0](batch(5, 6)).shape == (5, 4)


def test_a_copied_subclass_keeps_its_class():
    model = nn.Sequential(Query(6, 4))
    optimizer = forge.attach(model, lr=1e-3)
    other = pickle.loads(pickle.dumps(model))
    assert type(other[0]) is Query
    assert optimizer.owned


class Query(nn.Linear):
    """At module level, as pickle asks for."""


def _train_elsewhere(model, queue):
    x = batch(5, 6)
    model(x).square().mean().backward()
    queue.put([p.grad is not None for p in model.parameters()] + [type(model[0]) is nn.Linear])


def test_a_spawned_process_gets_an_ordinary_model():  # field log row 81
    pair = Pair(mlp(6, 8, 4))
    pair.train(mean_square(batch(5, 6)))
    context = mp.get_context("spawn")
    queue = context.Queue()
    before = snapshot(pair.model, pair.optimizer)
    process = context.Process(target=_train_elsewhere, args=(pair.model, queue))
    process.start()
    assert queue.get(timeout=120) == [True] * 5
    process.join()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_the_optimizer_itself_is_not_copied(duplicate):
    optimizer = forge.attach(mlp(6, 4), lr=1e-3)
    with pytest.raises(TypeError, match="state_dict"):
        duplicate(optimizer)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "reference"),
        ({"clip_grad_norm": 0.1}, "reference"),
        ({"accumulation_steps": 2}, "reference"),
        ({"clip_grad_norm": 0.1}, "triton"),
    ],
)
def test_nothing_lives_on_without_the_collector(backend, options, no_collector):  # field log row 140
    def live():
        # Tables of addresses, which are integers, live in a bounded cache of the kernels.
        return sum(type(o) in (torch.Tensor, nn.Parameter) and o.is_floating_point() for o in gc.get_objects())

    def cycle():
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-3, backend=backend, **options)
        for seed in range(2):
            model(batch(5, 6, seed=seed)).square().mean().backward()
            if seed % 2 or "accumulation_steps" not in options:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.coverage, optimizer.state_dict()
        return [weakref.ref(o) for o in (model, optimizer, model[0].weight, *optimizer.owned.values())]

    cycle()
    tensors = live()
    for _ in range(20 if backend == "reference" else 3):
        assert all(reference() is None for reference in cycle())
    assert live() <= tensors


def test_long_training_keeps_nothing(no_collector):  # field log row 140
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)

    def train(steps):
        for seed in range(steps):
            model(batch(5, 6, seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(gc.get_objects())

    train(5)
    before = train(5)
    assert train(200) <= before + 10


def test_attach_and_detach_on_one_model_leave_nothing(no_collector):
    model = mlp(6, 8, 4)

    def cycle():
        optimizer = forge.attach(model, lr=1e-3)
        model(batch(5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.detach()

    cycle()
    before = len(gc.get_objects())
    for _ in range(20):
        cycle()
    assert len(gc.get_objects()) <= before + 10
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


def test_a_deleted_optimizer_leaves_no_hooks(no_collector):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-3)
    reference = weakref.ref(optimizer)
    del optimizer
    assert reference() is None
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


def test_a_loss_that_is_kept_does_not_keep_the_activations_of_a_step():
    pair = Pair(mlp(6, 8, 4), waiting=True)
    loss = pair.model(batch(5, 6)).square().mean()
    loss.backward()
    kept = [weakref.ref(k.x) for owned in pair.optimizer.owned.values() for k in owned.factors.kept]
    pair.optimizer.step()
    gc.collect()
    assert kept == [] or all(reference() is None for reference in kept)
