"""Shared weights in public faults: one update from the sum of all uses, by the weight that the forward read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, mlp


@backends
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_layer_whose_first_call_is_checkpointed(backend, reentrant):  # field log row 27
    """The gradient and the input gradient of the same graph without a checkpoint, and one step."""
    layer, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(layer.state_dict())
    optimizer = forge.attach(layer, lr=1e-2, backend=backend)
    oracle = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x, twin_x = (batch(5, 8).requires_grad_() for _ in range(2))
    layer(checkpoint(layer, x, use_reentrant=reentrant)).square().mean().backward()
    plain(plain(twin_x)).square().mean().backward()
    gradient = plain.weight.grad.clone()
    optimizer.step()
    oracle.step()
    state = optimizer.state[layer.weight]
    assert state["step"] == 1
    torch.testing.assert_close(state["exp_avg"], 0.1 * gradient, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(layer.weight, plain.weight, rtol=0, atol=1e-6)
    # By a recomputation with the new weight it would be far off: the step is 1e-2 in every coordinate.
    torch.testing.assert_close(x.grad, twin_x.grad, rtol=0, atol=1e-7)


@backends
@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "non_reentrant", "reentrant"])
def test_one_layer_applied_six_times(backend, checkpointed):  # field log row 28
    torch.manual_seed(0)
    pair = Pair(nn.Linear(64, 64), backend=backend)
    x = batch(4, 64).requires_grad_()

    def loss(model):
        h = x
        for _ in range(6):
            h = model(h) if checkpointed is None else checkpoint(model, h, use_reentrant=checkpointed)
            h = torch.tanh(h)
        return h.square().mean()

    for _ in range(5):
        pair.backward(loss)
        owned = pair.optimizer.owned[pair.model.weight]
        assert owned.updated or owned.factors
        pair.close()
    pair.expect_equal()
    assert pair.optimizer.state[pair.model.weight]["step"] == 5


@backends
def test_one_parameter_under_two_names_is_one_update(backend):  # field log row 30
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.m1, self.m2 = nn.Linear(6, 6), nn.Linear(6, 6)
            self.m2.weight = self.m1.weight

        def forward(self, x):
            return self.m2(torch.tanh(self.m1(x)))

    pair = Pair(Aliased(), backend=backend)
    for _ in range(3):
        pair.train(lambda model: model(batch(5, 6)).square().mean())
    pair.expect_equal()
    assert [row.name for row in pair.optimizer.coverage if row.fused] == ["m1.weight"]
    assert len(pair.optimizer.state) == 3
    assert pair.optimizer.state[pair.model.m2.weight]["step"] == 3


@backends
def test_two_views_of_one_storage_are_refused(backend):  # field log row 30
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are different parameters in the same memory"):
        forge.attach(model, lr=1e-3, backend=backend)


class Tied(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


@pytest.mark.parametrize(("backend", "vocabulary", "width"), [("reference", 50257, 64), ("triton", 131, 16)])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}], ids=["immediate", "clipped"])
def test_a_tied_embedding_and_head(backend, vocabulary, width, options, monkeypatch):  # field log row 32
    """Two steps; what is allocated holds NaN until it is written."""
    real = torch.empty

    def poisoned(*size, **kwargs):
        tensor = real(*size, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    pair = Pair(Tied(vocabulary, width), backend=backend, **options)
    monkeypatch.setattr(torch, "empty", poisoned)
    ids = torch.tensor([[1, 4, 4, vocabulary - 1], [0, 9, 2, 7]])
    before = pair.model.embedding.weight.detach().clone()
    for _ in range(2):
        pair.train(lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum"))
    weight = pair.model.embedding.weight
    assert weight.isfinite().all()
    pair.expect_equal(atol=2e-6)
    absent = [row for row in range(vocabulary) if row not in ids]
    moved = (weight.detach() - before * (1 - 1e-3 * 1e-2) ** 2)[absent].abs()
    # The head's gradient reaches the rows of ids that are not in the batch: two AdamW steps of 1e-3.
    assert (moved > 1e-3).float().mean(1).min() > 0.9


def test_a_tie_that_materialising_lost():  # field log row 36
    """torch's to_empty gives each name its own storage: what is attached is what the model is, and says so."""

    class Config:
        tie_word_embeddings = True

    class Model(Tied):
        config = Config()

        def get_input_embeddings(self):
            return self.embedding

        def get_output_embeddings(self):
            return self.head

        def tie_weights(self):
            self.head.weight = self.embedding.weight

    with torch.device("meta"):
        model = Model(11, 6)
    with pytest.raises(ValueError, match=r"embedding\.weight is on the meta device"):
        forge.attach(model, lr=1e-3)
    model.to_empty(device="cpu")
    model.load_state_dict(Model(11, 6).state_dict())
    if model.head.weight is not model.embedding.weight:
        with pytest.warns(UserWarning, match=r"head and embedding are two parameters .* Call model\.tie_weights\(\)"):
            forge.attach(model, lr=1e-3)
        model.tie_weights()
    pair = Pair(model)
    ids = torch.tensor([[1, 4, 4], [0, 9, 2]])
    for _ in range(3):
        pair.train(lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))
    assert pair.model.head.weight is pair.model.embedding.weight
    pair.expect_equal()


@backends
def test_a_shared_layer_in_two_models(backend):
    """Each model has an optimizer; the shared layer belongs to one."""
    shared = nn.Linear(6, 6)
    first, second = nn.Sequential(mlp(6, 6), shared), nn.Sequential(shared, mlp(6, 4))
    a = forge.attach(first, lr=1e-3, backend=backend)
    with pytest.raises(ValueError, match="another ForgeOptimizer already steps this weight"):
        forge.attach(second, lr=1e-3, backend=backend)
    b = forge.attach(second, params=second[1].parameters(), lr=1e-3, backend=backend)
    second(first(batch(5, 6))).square().mean().backward()
    a.step()
    b.step()
    assert a.state[shared.weight]["step"] == 1
    assert shared.weight not in b.state
    assert b.state[second[1][0].weight]["step"] == 1
