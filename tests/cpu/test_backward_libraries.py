"""Modules and wrappers that read a weight past its module, and what refuses to wrap an attached model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.utils import prune

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


@backends
def test_multihead_attention_reads_its_output_projection_itself(backend):
    """No biases: a key's has a gradient of zero, whose rounding AdamW would make a step of."""
    torch.manual_seed(0)
    pair = Pair(nn.MultiheadAttention(8, 2, bias=False, batch_first=True), backend=backend)
    x = batch(2, 5, 8)
    for _ in range(3):
        pair.train(lambda model: model(x, x, x)[0].square().mean())
    pair.expect_equal()
    row = next(row for row in pair.optimizer.coverage if row.name == "out_proj.weight")
    assert not row.fused
    assert "without calling its module" in row.how


@backends
def test_a_transformer_encoder_layer(backend):
    torch.manual_seed(0)
    pair = Pair(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, bias=False, batch_first=True), backend=backend)
    x, c = batch(2, 5, 8), batch(2, 5, 8, seed=1)
    for _ in range(2):
        pair.train(lambda model: (model(x) * c).sum())
    pair.expect_equal()
    fused = {row.name for row in pair.optimizer.coverage if row.fused}
    assert fused == {"linear1.weight", "linear2.weight"}


def test_the_fast_path_of_a_transformer_encoder_layer_reads_the_trained_weights():
    """In eval mode without gradients torch calls one fused operator with the parameters."""
    torch.manual_seed(0)
    pair = Pair(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, bias=False, batch_first=True))
    x, c = batch(2, 5, 8), batch(2, 5, 8, seed=1)
    pair.train(lambda model: (model(x) * c).sum())
    pair.model.eval(), pair.twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(pair.model(x), pair.twin(x), rtol=0, atol=1e-5)
    pair.model.train(), pair.twin.train()
    pair.train(lambda model: (model(x) * c).sum())
    pair.expect_equal()


def test_bilinear_recurrent_and_convolutional_weights_are_stepped_from_grad():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 6, 3, padding=1)
            self.lstm = nn.LSTM(6, 5, batch_first=True)
            self.bilinear = nn.Bilinear(5, 5, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            h, _ = self.lstm(torch.tanh(self.conv(x)).transpose(1, 2))
            return self.head(self.bilinear(h, h))

    pair = Pair(Model())
    x = batch(2, 4, 7)
    for _ in range(2):
        pair.train(mean_square(x))
    pair.expect_equal()
    assert [row.name for row in pair.optimizer.coverage if row.fused] == ["head.weight"]


def reparametrized(how):
    model = mlp(6, 8, 4)
    if how == "weight_norm":
        nn.utils.parametrizations.weight_norm(model[0])
    elif how == "spectral_norm":
        # In training mode it advances its power iteration in every forward.
        nn.utils.parametrizations.spectral_norm(model.eval()[0])
    elif how == "parametrize":
        nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    else:
        prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


@backends
@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "parametrize", "prune"])
def test_a_reparametrized_weight_is_stepped_from_grad(backend, how):
    pair = Pair(reparametrized(how), twin=reparametrized(how), backend=backend)
    x = batch(5, 6)
    for _ in range(3):
        pair.train(mean_square(x))
    pair.expect_equal()
    rows = {row.name: row for row in pair.optimizer.coverage}
    assert rows["2.weight"].fused
    assert not any(row.fused for name, row in rows.items() if name.startswith("0."))


def test_a_subclass_that_keeps_nn_linears_forward_is_fused():
    class Named(nn.Linear):
        """A subclass with an attribute."""

        purpose = "query"

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(Named(6, 4)))
    assert isinstance(pair.model[0], Named)
    assert pair.model[0].purpose == "query"
    assert next(iter(pair.optimizer.coverage)).fused
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_a_subclass_with_a_forward_of_its_own_is_not_fused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    pair = Pair(nn.Sequential(Doubled(6, 4)))
    assert "forward of its own" in next(iter(pair.optimizer.coverage)).how
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_a_lazy_linear_is_attached_after_its_first_forward():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"^0\.weight has no shape yet"):
        forge.attach(model, lr=1e-3)
    model(batch(5, 6))
    pair = Pair(model)
    assert next(iter(pair.optimizer.coverage)).fused
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = mlp(6, 4)
    with pytest.raises(ValueError, match=r"^0\.weight is on the meta device"):
        forge.attach(model, lr=1e-3)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("order", ["attach_first", "wrapper_first"])
def test_distributed_data_parallel_is_refused(one_rank, order):
    model = mlp(6, 8, 4)
    if order == "attach_first":
        optimizer = forge.attach(model, lr=1e-2)
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = forge.attach(wrapped, lr=1e-2)
    before = snapshot(model, optimizer)
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        wrapped(batch(5, 6))
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"), wrapped.no_sync():
        wrapped(batch(5, 6))
    expect_bit_equal(before, snapshot(model, optimizer))
    optimizer.detach()
    wrapped(batch(5, 6)).square().mean().backward()


def test_sharded_weights_that_nobody_reduces_are_refused(one_rank):
    model = mlp(6, 4)
    distribute_module(model, init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match=r"^0\.weight is a DTensor that no fully_shard call manages"):
        forge.attach(model, lr=1e-2)


def test_data_parallel_without_devices_is_the_module_itself():
    pair = Pair(nn.DataParallel(mlp(6, 8, 4)))
    pair.train(mean_square(batch(5, 6)))
    pair.expect_equal()
    assert [row.name for row in pair.optimizer.coverage] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_names_keep_submodules_whose_names_end_in_a_wrappers():
    model = nn.ModuleDict({"submodule": nn.Linear(4, 3), "module": nn.Linear(4, 3)})
    optimizer = forge.attach(model, lr=1e-3)
    assert list(optimizer.names.values()) == ["submodule.weight", "submodule.bias", "weight", "bias"]
    clash = nn.ModuleDict({"a": nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})})
    clash["a"].register_parameter("weight", nn.Parameter(torch.zeros(2)))
    optimizer = forge.attach(clash, lr=1e-3)
    assert list(optimizer.names.values()) == ["a.weight", "a.module.weight"]
