"""The head and its loss in one, against F.cross_entropy of whole logits and torch.optim."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import forge_megatron as forge
from forge_megatron.vocab import LinearCrossEntropy, linear_cross_entropy, logits
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, snapshot

WIDTH, VOCABULARY = 6, 37
TARGETS = torch.tensor([3, 36, 0, 17, 3, -100, 20])
NO_TARGETS = torch.full((7,), -100)


@pytest.fixture(autouse=True)
def blocks_of_16_rows(monkeypatch):
    """Three blocks of the vocabulary, the last one shorter."""
    monkeypatch.setattr(logits, "BLOCK_LOGITS", 1)


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def forward(self, x):
        return torch.tanh(self.body(x))


def whole(hidden, head, targets, *, label_smoothing=0.0, z_loss=0.0, ignore_index=-100, reduction="mean"):
    """The same from whole logits; the z-loss by hand."""
    z = head(hidden).double()
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    losses = F.cross_entropy(z, targets, reduction="none", **options)
    losses = losses + torch.where(targets == ignore_index, 0.0, z_loss * z.logsumexp(-1) ** 2)
    if reduction == "mean" and not z_loss:
        return F.cross_entropy(z, targets, **options)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / (targets != ignore_index).sum()}[reduction]


class Compared(Pair):
    """The model with the fused head, and its twin with whole logits."""

    def __init__(self, *args, backend="reference", **options):
        super().__init__(*args, backend=backend, **options)
        self.kernels = backend

    def train(self, x, targets, weights=None, **options):
        self.losses = []
        for (model, _), loss in zip(self.sides(), (self.fused, whole), strict=True):
            value = loss(model(x), model.head, targets, **options)
            value.backward(weights if weights is None else weights.to(value.dtype))
            self.losses.append(value.detach())
        self.close()

    def fused(self, hidden, head, targets, **options):
        return linear_cross_entropy(hidden, head, targets, backend=self.kernels, **options)

    def expect_equal_losses(self):
        torch.testing.assert_close(self.losses[0], self.losses[1].float(), rtol=1e-6, atol=1e-6, equal_nan=True)


@backends
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0},
        {"z_loss": 0.01, "label_smoothing": 0.1},
        {"ignore_index": 3},
    ],
    ids=str,
)
def test_steps_equal_torchs(backend, options):
    pair = Compared(Model(), backend=backend)
    targets = TARGETS if options.get("ignore_index") is None else TARGETS.clamp(min=0)
    for seed in range(3):
        pair.train(batch(7, 5, seed=seed), targets, **options)
        pair.expect_equal_losses()
    pair.expect_equal()
    assert {row.name: row.how for row in pair.optimizer.coverage}["head.weight"] == "fused"
    assert pair.model.head.weight.grad is None


@backends
def test_every_token_has_its_own_upstream_gradient(backend):  # field log row 70, with a bias
    pair = Compared(Model(), rule="sgd", backend=backend)
    for seed in range(2):
        pair.train(batch(7, 5, seed=seed), TARGETS, weights=batch(7, seed=9), reduction="none", z_loss=0.01)
        pair.expect_equal_losses()
    pair.expect_equal(atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_targets(reduction):
    """The mean over none is NaN, its gradient 0, and the step is the one with G = 0."""
    pair = Compared(Model(bias=False), weight_decay=0.5)
    pair.train(batch(7, 5), TARGETS)
    pair.train(batch(7, 5), NO_TARGETS, reduction=reduction)
    pair.expect_equal_losses()
    assert pair.losses[0].isnan() == (reduction == "mean")
    pair.expect_equal()


@backends
def test_a_bias_takes_tokens_out_of_the_vocabulary(backend):
    pair = Compared(Model(), backend=backend)
    for model, _ in pair.sides():
        with torch.no_grad():
            model.head.bias[21:] = float("-inf")
        model.head.bias.requires_grad_(False)
    pair.train(batch(7, 5), TARGETS.clamp(max=20))
    pair.expect_equal_losses()
    pair.expect_equal()


@backends
def test_clipping_forms_the_gradient_again_at_the_step(backend):
    """The hidden states that the caller hands in are kept, though the next batch is written to them."""
    model = nn.ModuleDict({"head": nn.Linear(WIDTH, VOCABULARY)})
    pair = Compared(model, clip=0.1, backend=backend)
    hidden = torch.empty(7, WIDTH)
    for seed in range(2):
        for (side, _), loss in zip(pair.sides(), (pair.fused, whole), strict=True):
            hidden.copy_(batch(7, WIDTH, seed=seed))
            loss(hidden, side.head, TARGETS).backward()
            hidden.zero_()
        pair.close()
        torch.testing.assert_close(pair.optimizer.grad_norm, pair.twin_norm, rtol=1e-5, atol=0)
    pair.expect_equal()


@backends
@pytest.mark.parametrize("micro_batches", [2, 12])
def test_accumulation(backend, micro_batches):
    """Twelve batches of seven tokens outgrow the head's gradient, and are summed up in one."""
    pair = Compared(Model(), accumulation_steps=micro_batches, backend=backend)
    for seed in range(micro_batches):
        for (model, _), loss in zip(pair.sides(), (pair.fused, whole), strict=True):
            loss(model(batch(7, 5, seed=seed)), model.head, TARGETS).backward()
    pair.close()
    pair.expect_equal()


@backends
def test_two_losses_of_one_head(backend):
    """Of unequal numbers of tokens, one of them through whole logits: one update from the sum."""
    pair = Compared(Model(), backend=backend)
    for _ in range(2):
        for (model, _), loss in zip(pair.sides(), (pair.fused, whole), strict=True):
            first = loss(model(batch(7, 5)), model.head, TARGETS)
            second = loss(model(batch(3, 5, seed=1)), model.head, TARGETS[:3])
            (first + 0.3 * second + whole(model(batch(2, 5, seed=2)), model.head, TARGETS[:2])).backward()
        pair.close()
    pair.expect_equal()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant):
    pair = Compared(Model())
    for _ in range(2):
        for (model, _), loss in zip(pair.sides(), (pair.fused, whole), strict=True):
            checkpoint(loss, model(batch(7, 5)), model.head, TARGETS, use_reentrant=reentrant).backward()
        pair.close()
    pair.expect_equal()


def test_a_frozen_head_passes_its_gradient_on():
    pair = Compared(Model())
    for model, _ in pair.sides():
        model.head.requires_grad_(False)
    pair.train(batch(7, 5), TARGETS)
    pair.expect_equal()


def test_evaluation_and_autograd_grad_change_nothing():
    model = Model()
    optimizer = forge.attach(model, lr=1e-2)
    before = snapshot(model, optimizer)
    with torch.no_grad():
        linear_cross_entropy(model(batch(7, 5)), model.head, TARGETS)
    hidden = batch(7, WIDTH).requires_grad_()
    bare = copy.deepcopy(model.head)
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, model.head.weight, TARGETS), hidden)
    (theirs,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden, bare.weight), TARGETS), hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_weight_that_an_ordinary_optimizer_steps():
    hidden, weight, bias = batch(7, WIDTH), batch(VOCABULARY, WIDTH, seed=1), batch(VOCABULARY, seed=2)
    gradients = []
    for loss in (
        lambda h, w, b: linear_cross_entropy(h, w, TARGETS, bias=b),
        lambda h, w, b: F.cross_entropy(F.linear(h, w, b).double(), TARGETS),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        loss(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_operands(autocast):
    """Against fp64: off by the rounding of the logits' gradient to bf16, and of what is stored."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float32 if autocast else torch.bfloat16)
    rounded, hidden = head.weight.detach().bfloat16().double(), batch(7, WIDTH).bfloat16()
    optimizer = forge.attach(head, "sgd", lr=1.0)
    before, bias = head.weight.detach().double(), head.bias.detach().double()
    x, exact = (hidden.to(dtype, copy=True).requires_grad_() for dtype in (torch.bfloat16, torch.float64))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(x, head, TARGETS)
    loss.backward()
    optimizer.step()
    weight = rounded.requires_grad_()
    expected = F.cross_entropy(F.linear(exact, weight, bias), TARGETS)
    expected.backward()
    assert loss.dtype is torch.float32
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=eps, atol=eps * exact.grad.abs().max().item())
    got = before - head.weight.detach().double()
    stored = eps * before.abs().max().item() if not autocast else 0.0
    torch.testing.assert_close(got, weight.grad, rtol=eps, atol=eps * weight.grad.abs().max().item() + stored)


@backends
@pytest.mark.parametrize("recipe", ["sr-store", "int8"])
def test_what_a_block_of_rows_is_stored_with_is_the_whole_weights(recipe, backend, monkeypatch):
    """Random bits and scales: in blocks of rows as at once."""
    heads = []
    for block in (1, 1 << 25):
        monkeypatch.setattr(logits, "BLOCK_LOGITS", block)
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.bfloat16)
        optimizer = forge.attach(head, lr=1e-4, recipe=recipe, backend=backend)
        for seed in range(2):
            linear_cross_entropy(batch(7, WIDTH, seed=seed).bfloat16(), head, TARGETS, backend=backend).backward()
            optimizer.step()
            optimizer.zero_grad()
        heads.append(snapshot(head, optimizer))
    expect_bit_equal(*heads)


def test_as_a_module():
    pair = Pair(Model())
    for (model, _), loss in zip(pair.sides(), (None, whole), strict=True):
        hidden = model(batch(7, 5))
        value = (
            LinearCrossEntropy(model.head, z_loss=0.1)(hidden, TARGETS)
            if loss is None
            else whole(hidden, model.head, TARGETS, z_loss=0.1)
        )
        value.backward()
    pair.close()
    pair.expect_equal()


def test_a_weight_that_is_written_before_the_step_is_refused():
    head = nn.Linear(WIDTH, VOCABULARY)
    optimizer = forge.attach(head, lr=1e-2, waiting=True)
    linear_cross_entropy(batch(7, WIDTH), head, TARGETS).backward()
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"targets": torch.full((7,), VOCABULARY)}, IndexError, "target 37 is outside the vocabulary of 37"),
        ({"targets": torch.full((7,), -1)}, IndexError, "target -1 is outside the vocabulary of 37"),
        ({"targets": torch.zeros(6, dtype=torch.int64)}, ValueError, r"targets \[6\]; expected"),
        ({"targets": torch.zeros(7)}, TypeError, "targets are torch.float32; class probabilities are not built"),
        ({"hidden": torch.zeros(7, 5)}, ValueError, r"hidden is \[7, 5\]"),
        ({"hidden": torch.zeros(7, WIDTH).bfloat16()}, TypeError, "hidden is torch.bfloat16 and the weight"),
        ({"hidden": torch.zeros(7, WIDTH).double()}, TypeError, "hidden is torch.float64"),
        ({"bias": torch.zeros(3)}, ValueError, r"the bias is \[3\], expected \[37\]"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
        ({"z_loss": -1.0}, ValueError, "z_loss=-1.0"),
        ({"reduction": "batchmean"}, ValueError, "reduction='batchmean' is unknown"),
    ],
    ids=str,
)
def test_refused_by_name(change, error, match):
    given = {"hidden": batch(7, WIDTH), "targets": TARGETS, **change}
    with pytest.raises(error, match=match):
        linear_cross_entropy(weight=torch.zeros(VOCABULARY, WIDTH), **given)


class ScaledHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 8


def hooked():
    head = nn.Linear(WIDTH, VOCABULARY)
    head.register_forward_hook(lambda module, inputs, output: output / 8)
    return head


@pytest.mark.parametrize(
    ("head", "error", "match"),
    [
        (lambda: ScaledHead(WIDTH, VOCABULARY), NotImplementedError, "a ScaledHead, has a forward of its own"),
        (hooked, NotImplementedError, "a Linear, has hooks, which run where it is called"),
        (lambda: prune.identity(nn.Linear(WIDTH, VOCABULARY), "weight"), NotImplementedError, "a Linear, has hooks"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, VOCABULARY)), TypeError, "the head is a Sequential; give an nn.Linear"),
    ],
    ids=["forward", "hook", "pruned", "module"],
)
def test_a_head_that_is_more_than_a_product_is_refused(head, error, match):
    with pytest.raises(error, match=match):
        linear_cross_entropy(batch(7, WIDTH), head(), TARGETS)
