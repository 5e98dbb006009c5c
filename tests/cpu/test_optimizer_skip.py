"""A gradient that is not finite: skipped whole with ``skip="atomic"``, coordinate by coordinate otherwise, and told."""

import math

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.coordinator import Skip
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot


class Poisons(torch.autograd.Function):
    """Identity whose gradient is not finite in one place."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        dy.flatten()[0] = ctx.value
        return dy, None


def poisoned(model: nn.Sequential, x, layer: int, value: float):
    """The forward of ``model`` with a gradient that is not finite at the output of ``layer``."""
    for index, module in enumerate(model):
        x = module(x)
        x = Poisons.apply(x, value) if index == layer else x
    return x.square().mean()


@backends
@pytest.mark.parametrize(
    ("layer", "bad", "options"),
    [
        (0, math.inf, {}),
        (2, math.nan, {"recipe": "bf16-state"}),
        (4, math.inf, {"clip": 0.1}),
        (4, math.nan, {"rule": "sgd"}),
    ],
    ids=["first", "middle_bf16", "last_clip", "last_sgd"],
)
def test_an_atomic_skip_leaves_every_bit(backend, bad, layer, options):  # field log rows 10, 88
    pair = Pair(mlp(6, 8, 8, 4), backend=backend, skip="atomic", **options)
    seen = []
    pair.optimizer.on_skip(seen.append)
    x = batch(5, 6)
    pair.train(mean_square(x))
    before = snapshot(pair.model, pair.optimizer)
    poisoned(pair.model, x, layer, bad).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    expect_bit_equal(before, snapshot(pair.model, pair.optimizer))
    assert not math.isfinite(pair.optimizer.grad_norm)
    assert pair.optimizer.skipped_steps == len(seen) == 1
    assert seen[0].step == 2
    assert seen[0].whole
    assert f"{layer}.weight" in seen[0].names
    assert f"{layer + 2}.weight" not in seen[0].names
    # The bias corrections of the next step are those of the second update.
    pair.train(mean_square(x))
    if "recipe" not in options and "rule" not in options:
        pair.expect_equal()


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *(
            (rule, {})
            for rule in ("nadam", "lamb", "muon", "scion", "adafactor", "adalomo", "adam_mini", "lars", "sm3")
        ),
        # In a step that refreshes the projection too, which the device takes back.
        *((rule, {"update_proj_gap": gap}) for rule in ("galore", "apollo", "apollo_mini") for gap in (1, 200)),
        ("adamw", {"recipe": "int8"}),
        ("adamw", {"recipe": "fp8"}),
        ("adamw", {"recipe": "sr-store"}),
    ],
)
def test_rules_and_formats_that_read_more_than_a_coordinate_are_skipped_whole(rule, options):
    """Also those whose gradient is good: a row, a layer, a block of states, a number on the host."""
    model = mlp(16, 16, 16, bias=rule != "muon")
    model = model.bfloat16() if options else model
    optimizer = forge.attach(model, rule, lr=1e-2, skip="atomic", **options)
    for layer in (None, 0, None):
        before = snapshot(model, optimizer)
        poisoned(model, batch(5, 16).to(model[0].weight.dtype), -1 if layer is None else layer, math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
        if layer is not None:
            expect_bit_equal(before, snapshot(model, optimizer))
    assert optimizer.skipped_steps == 1
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert all(p.isfinite().all() for p in model.parameters())


@backends
@pytest.mark.parametrize("bad", [0, 2], ids=["first", "last"])
def test_one_bad_micro_batch_skips_the_window(backend, bad):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, skip="atomic", accumulation_steps=3, recipe="fp32-master")
    before = snapshot(model, optimizer)
    for micro in range(3):
        poisoned(model, batch(5, 6, seed=micro), 0 if micro == bad else -1, math.nan).backward()
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    assert optimizer.skipped_steps == 1


@backends
def test_a_bad_gradient_of_an_ordinary_parameter_skips_the_owned_weights(backend):
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
    optimizer = forge.attach(model, lr=1e-2, backend=backend, skip="atomic")
    before = snapshot(model, optimizer)
    (model(batch(5, 6)).square().mean() + model[0].weight[0] * math.inf).backward()
    seen = []
    optimizer.on_skip(seen.append)
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    assert seen == [Skip(step=1, whole=True, names=("0.weight",))]


def test_another_ranks_bad_gradient_skips_here():
    """``reduce_norm_sq`` is where ranks meet: what it returns decides for all of them."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    optimizer.reduce_norm_sq = lambda norms_sq: norms_sq.sum(dtype=torch.float64) + math.inf
    seen = []
    optimizer.on_skip(seen.append)
    before = snapshot(model, optimizer)
    model(batch(5, 6)).square().mean().backward()
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    assert seen == [Skip(step=1, whole=True, names=())]


@backends
def test_good_steps_are_those_of_the_other_modes(backend):
    pair = Pair(mlp(6, 8, 4), backend=backend, skip="atomic")
    pair.train(*[mean_square(batch(5, 6, seed=seed)) for seed in range(3)])
    pair.expect_equal()
    assert pair.optimizer.skipped_steps == 0


@backends
@pytest.mark.parametrize("options", [{}, {"waiting": True}], ids=["immediate", "waiting"])
def test_flagged_coordinates_keep_their_bits(backend, options):
    """Without skip="atomic": the rows of a bad output gradient are left alone, the others are stepped."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, backend=backend, **options)
    seen = []
    optimizer.on_skip(seen.append)
    before = snapshot(model, optimizer)
    poisoned(model, batch(5, 6), 2, math.nan).backward()
    optimizer.step()
    weight, state = model[2].weight, optimizer.state[model[2].weight]
    assert torch.equal(weight[0], before[2][0])
    assert not state["exp_avg"][0].any()
    assert not torch.equal(weight[1:], before[2][1:])
    assert optimizer.skipped_steps == 1
    # The poison travels down with the input gradient.
    assert seen == [Skip(step=1, whole=False, names=("0.weight", "0.bias", "2.weight", "2.bias"))]
    assert state["step"] == 1


def test_a_schedule_that_counts_real_updates():  # field log row 86
    """A scheduler is the user's: it is stepped unless the step was skipped."""
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1.0, skip="atomic")
    used = []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1 / (1 + updates))
    for bad in (False, True, False):
        skipped = optimizer.skipped_steps
        poisoned(model, batch(5, 6), 0 if bad else -1, math.inf).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.skipped_steps == skipped:
            used.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert used == [1.0, 0.5]
    assert scheduler.last_epoch == 2


def test_a_skip_is_logged_and_a_callback_can_be_removed(caplog):  # field log row 88
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    seen = []
    handle = optimizer.on_skip(seen.append)
    for _ in range(2):
        poisoned(model, batch(5, 6), 2, math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.remove()
    assert [skip.step for skip in seen] == [1]
    poisoned(model, batch(5, 6), 0, math.inf).backward()
    optimizer.step()
    assert optimizer.skip_counts == {"0.weight": 3, "0.bias": 3, "2.weight": 2, "2.bias": 2}
    caplog.records.pop()
    assert [record.getMessage() for record in caplog.records] == [
        f"step {step}: the gradient of 0.weight, 0.bias, 2.weight and 1 more is not finite; nothing was changed"
        for step in (1, 2)
    ]
    assert str(Skip(3, False, ())) == (
        "step 3: a gradient of another rank or optimizer, or the gradient_multiplier, is not finite; "
        "those coordinates were left as they were"
    )


def test_a_callback_may_stop_the_run():
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")

    def stop(skip):
        raise FloatingPointError(skip.names)

    optimizer.on_skip(stop)
    before = snapshot(model, optimizer)
    poisoned(model, batch(5, 6), 0, math.inf).backward()
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        optimizer.step()
    optimizer.zero_grad()
    expect_bit_equal(before, snapshot(model, optimizer))
    model(batch(5, 6)).sum().backward()
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [1, 1]


def test_a_flag_that_arrives_late_is_read_before_the_next_update(monkeypatch):
    """As on a GPU: the norms reach the host one step later, and the counts of a skipped step are taken back then."""
    from forge_megatron.coordinator.skips import Skips

    settle = Skips.settle
    monkeypatch.setattr(Skips, "settle", lambda self, wait=False: settle(self) if wait else None)
    pair = Pair(mlp(6, 8, 4), skip="atomic")
    x = batch(5, 6)
    pair.train(mean_square(x))
    poisoned(pair.model, x, 0, math.nan).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    assert pair.optimizer._skips.count == 0
    # Whoever asks for norms before step() writes the step's bias corrections.
    pair.backward(mean_square(x))
    pair.optimizer.norms_sq()
    pair.close()
    pair.expect_equal()
    assert pair.optimizer.skipped_steps == 1


def test_a_checkpoint_waits_for_the_flag(monkeypatch):
    from forge_megatron.coordinator.skips import Skips

    settle = Skips.settle
    monkeypatch.setattr(Skips, "settle", lambda self, wait=False: settle(self) if wait else None)
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2, skip="atomic")
    poisoned(model, batch(5, 6), 0, math.nan).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(entry["step"] == 0 for entry in optimizer.state_dict()["state"].values())
