"""An owned embedding: stepped inside backward from sums by token id, as torch.optim steps its dense gradient."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, snapshot

IDS = torch.tensor([[1, 4, 4, 10], [0, 9, 4, 1]])
OTHERS = torch.tensor([[3, 3, 2, 0]])


class Model(nn.Module):
    """An embedding of 11 tokens, most of which no test looks up, and a linear layer."""

    def __init__(self, width: int = 6, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, width, **options)
        self.linear = nn.Linear(width, 3)

    def forward(self, ids):
        return self.linear(torch.tanh(self.embedding(ids)))


def loss(*batches):
    """Of the sum over several calls of the model, in one graph."""
    return lambda model: sum(model(ids).square().mean() for ids in batches)


def expect_fused(pair):
    (row,) = [row for row in pair.optimizer.coverage if row.name.endswith("embedding.weight")]
    assert row.how == "fused"
    assert pair.model.embedding.weight.grad is None


@backends
@pytest.mark.parametrize("options", [{}, {"padding_idx": 4}, {"padding_idx": -1}], ids=str)
def test_steps_equal_torchs_on_the_dense_gradient(backend, options):
    pair = Pair(Model(**options), weight_decay=0.5, backend=backend)
    with torch.no_grad():
        pair.model.embedding.weight[4] = pair.twin.embedding.weight[4] = 1.0
    pair.train(loss(IDS), loss(OTHERS), loss(IDS))
    pair.expect_equal()
    expect_fused(pair)


@backends
@pytest.mark.parametrize(
    "batches", [(IDS, OTHERS), (IDS[:, :0],), (IDS[0, 0],), (IDS.int(),)], ids=["twice", "none", "scalar", "int32"]
)
def test_uses_of_one_graph(backend, batches):
    pair = Pair(Model(), backend=backend)

    def total(model):
        return sum(model(ids).square().sum() for ids in batches)

    pair.train(total, total)
    pair.expect_equal()
    expect_fused(pair)


@backends
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(backend, reentrant):
    pair = Pair(Model(), backend=backend)
    anchor = torch.zeros((), requires_grad=True)

    def block(model):
        return lambda ids, anchor: model(ids) + anchor

    def total(model):
        return checkpoint(block(model), IDS, anchor, use_reentrant=reentrant).square().mean()

    pair.train(total, total)
    pair.expect_equal()
    expect_fused(pair)


@backends
def test_frozen_and_trained_again(backend):
    pair = Pair(Model(), backend=backend)
    for trains in (False, True):
        for model, _ in pair.sides():
            model.embedding.weight.requires_grad_(trains)
        pair.train(loss(IDS), loss(OTHERS))
    pair.expect_equal()


@backends
@pytest.mark.parametrize("lone", [False, True], ids=["model", "lone_embedding"])
def test_clipping_reads_the_exact_norm(backend, lone):
    """Both what autograd hands over and ids that the caller writes the next batch to are kept until step()."""
    pair = Pair(Model(), clip=0.05, backend=backend)
    ids, gradient = IDS.clone(), batch(2, 4, 6)
    for _ in range(2):
        for model, _ in pair.sides():
            ids.copy_(IDS)
            if lone:
                gradient.copy_(batch(2, 4, 6))
                model.embedding(ids).backward(gradient)
                gradient.zero_()
            else:
                loss(ids)(model).backward()
            ids.zero_()
        pair.close()
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
@pytest.mark.parametrize("micro_batches", [2, 9])
def test_accumulation(backend, micro_batches):
    """Nine batches of eight ids outgrow a gradient of 11 rows, and are summed up in one."""
    pair = Pair(Model(), accumulation_steps=micro_batches, backend=backend)
    for _ in range(2):
        for seed in range(micro_batches):
            ids = torch.randint(11, (2, 4), generator=torch.Generator().manual_seed(seed))
            pair.backward(loss(ids))
        pair.close()
    pair.expect_equal()


@backends
@pytest.mark.parametrize(
    ("dtype", "recipe"), [(torch.float32, "bf16-state"), (torch.bfloat16, "fp32-master")], ids=["bf16-state", "master"]
)
def test_formats(backend, dtype, recipe):
    model = Model().to(dtype)
    twin = copy.deepcopy(model).float()
    optimizer = forge.attach(model, lr=1e-2, recipe=recipe, backend=backend)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for side, stepped in ((model, optimizer), (twin, oracle)):
        side.embedding(IDS).float().square().sum().backward()
        stepped.step()
    state = optimizer.state[model.embedding.weight]
    # Half a unit in the last place of bf16, of a first moment of at most 1 or of a weight of at most 4.
    torch.testing.assert_close(
        state["exp_avg"].float(), oracle.state[twin.embedding.weight]["exp_avg"], rtol=8e-3, atol=0
    )
    torch.testing.assert_close(model.embedding.weight.float(), twin.embedding.weight, rtol=4e-3, atol=1e-6)


@backends
@pytest.mark.parametrize("recipe", ["sr-store", "int8"])
def test_formats_of_blocks_and_of_random_bits(backend, recipe):
    """As a linear's weight whose dY are the one-hot rows of the ids."""
    weight = batch(11, 70).bfloat16()
    embedding, linear = nn.Embedding(11, 70), nn.Linear(70, 11, bias=False)
    stored = []
    for module in (embedding, linear):
        module.weight = nn.Parameter(weight.clone())
        optimizer = forge.attach(nn.ModuleDict({"layer": module}), lr=1e-2, recipe=recipe, backend=backend)
        for seed in range(2):
            gradient = batch(8, 70, seed=seed).bfloat16()
            if module is embedding:
                module(IDS.flatten()).backward(gradient)
            else:
                one_hot = nn.functional.one_hot(IDS.flatten(), 11).bfloat16()
                module(gradient).backward(one_hot)
            optimizer.step()
            optimizer.zero_grad()
        stored.append([*snapshot(nn.Module(), optimizer), module.weight.detach().clone()])
    expect_bit_equal(*stored)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0 writes to the weight in every forward"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True weighs a token by its batch's counts"),
        ({"sparse": True}, "sparse=True asks for a sparse .grad"),
    ],
    ids=["max_norm", "scale_grad_by_freq", "sparse"],
)
def test_what_is_stepped_from_grad(options, reason):
    twin = Model(**{**options, "sparse": False})
    pair = Pair(Model(**options), twin=twin)
    pair.train(loss(IDS), loss(OTHERS))
    pair.expect_equal()
    assert {row.name: row.how for row in pair.optimizer.coverage}["embedding.weight"] == reason


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_an_option_that_is_set_after_attach_is_followed(option, value):
    pair = Pair(Model())
    pair.train(loss(IDS))
    for model, _ in pair.sides():
        setattr(model.embedding, option, value)
    pair.train(loss(IDS), loss(OTHERS), loss(IDS, OTHERS))
    pair.expect_equal()


def test_a_subclass_with_a_forward_of_its_own_is_stepped_from_grad():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 3 * super().forward(ids)

    optimizer = forge.attach(Scaled(5, 2), lr=1e-3)
    assert [row.how for row in optimizer.coverage] == ["Scaled has a forward of its own"]


def test_no_operation_of_a_step_makes_a_dense_gradient():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
            return out

    model = nn.Embedding(50257, 16)
    weight = model.weight
    optimizer = forge.attach(model, lr=1e-3)
    known = {tensor.untyped_storage().data_ptr() for tensor in (weight, *optimizer.state[weight].values())}
    before = weight.detach().clone()
    with Largest() as largest:
        model(IDS).square().sum().backward()
        assert weight.grad is None
        optimizer.step()
    assert not torch.equal(weight, before)
    # The reference kernel forms 2^17 coordinates at a time.
    assert largest.elements <= 1 << 17 < weight.numel() // 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_is_an_ordinary_embedding(duplicate):
    model = Model()
    optimizer = forge.attach(model, lr=1e-3)
    assert type(duplicate(model).embedding) is nn.Embedding
    optimizer.detach()
    assert type(model.embedding) is nn.Embedding


def test_a_replaced_weight_is_refused():
    model = Model()
    optimizer = forge.attach(model, lr=1e-3)
    model.embedding.weight = nn.Parameter(torch.zeros(11, 6))
    with pytest.raises(RuntimeError, match=r"embedding\.weight: the module's weight is another tensor than at attach"):
        model(IDS)
    assert optimizer.owned
