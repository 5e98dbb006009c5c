"""What the host does around a captured step. There is no CUDA graph here: a stand-in runs the device's part."""

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron import capture
from tests.cpu.replayer import Replayer, capturing
from tests.cpu.training import Pair, batch, expect_bit_equal, mlp, snapshot


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(capture.Capturing, "capture", capturing)


def stepping(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss,)

    return step


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("adamw", {}),
        ("nadam", {}),
        ("nadam", {"skip": "atomic"}),
        ("sgd", {}),
        ("adamw", {"clip_grad_norm": 0.1}),
        ("adamw", {"skip": "atomic"}),
        ("adamw", {"recipe": "fp32-master"}),
        ("adamw", {"recipe": "sr-store"}),
        ("adamw", {"recipe": "int8"}),
        ("lamb", {}),
        ("galore", {"rank": 2, "update_proj_gap": 3}),
        ("apollo", {"rank": 2, "update_proj_gap": 3, "skip": "atomic"}),
        ("apollo_mini", {"update_proj_gap": 3, "clip_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_schedules_bias_corrections_and_random_bits_follow_each_replay(rule, options):  # field log rows 77 and 79
    """Ten steps, of which three are warm-up, have the bits of ten eager ones."""
    runs = []
    for captured in (False, True):
        model = mlp(6, 8, 4).to(torch.bfloat16 if "recipe" in options else torch.float32)
        optimizer = forge.attach(model, rule, lr=1e-2, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        step = stepping(model, optimizer)
        step = optimizer.capture(step) if captured else step
        told = []
        for index in range(10):
            (loss,) = step(batch(5, 6, seed=index).to(model[0].weight.dtype))
            told += [loss.detach().clone(), optimizer.grad_norm.clone(), *optimizer.gradient_norms.values()]
            schedule.step()
        assert not captured or optimizer._graphs.recorded == 1
        assert all(state["step"] == 10 for state in optimizer.state.values())
        runs.append([*snapshot(model, optimizer), *told])
    expect_bit_equal(*runs)


def test_by_hand():  # field log row 79
    """SGD at lr 1e-2, 5e-3 and 0 with a gradient of 1, each of them replayed."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = forge.attach(model, "sgd", lr=0.0)
    step = optimizer.capture(lambda x: stepping_by_sum(model, optimizer, x), warmup=1)
    before = model.weight.item()
    for lr in (0.0, 1e-2, 5e-3, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        step(torch.ones(1, 1))
    assert optimizer._graphs.recorded == 1
    assert model.weight.item() - before == pytest.approx(-0.015, abs=1e-7)


def stepping_by_sum(model, optimizer, x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return (loss,)


def test_another_shape_and_another_set_of_trained_weights_are_recorded_anew():
    pair = Pair(mlp(6, 8, 4))
    step = pair.optimizer.capture(stepping(pair.model, pair.optimizer), warmup=1)
    recorded = []
    for rows, trains in ((5, True), (5, True), (3, True), (3, True), (5, True), (5, False), (5, False), (5, True)):
        for model in (pair.model, pair.twin):
            model[0].weight.requires_grad_(trains)
        x = batch(rows, 6, seed=rows)
        step(x)
        pair.twin(x).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
        recorded.append(pair.optimizer._graphs.recorded)
    pair.expect_equal()
    assert recorded == [0, 1, 1, 2, 2, 2, 3, 3]


def test_a_hyperparameter_that_selects_other_arithmetic_is_recorded_anew():
    pair = Pair(mlp(6, 8, 4), rule="sgd", momentum=0.9, nesterov=False)
    step = pair.optimizer.capture(stepping(pair.model, pair.optimizer), warmup=1)
    for index in range(6):
        for _, optimizer in pair.sides():
            optimizer.param_groups[0]["nesterov"] = index >= 3
        x = batch(5, 6, seed=index)
        step(x)
        pair.twin(x).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
    pair.expect_equal()


def test_a_checkpoint_is_loaded_between_replays_and_eager_steps_lie_between():
    pair = Pair(mlp(6, 8, 4))
    eager = stepping(pair.model, pair.optimizer)
    step = pair.optimizer.capture(eager, warmup=1)
    saved = None
    for index, run in enumerate((step, step, step, eager, step)):
        if index == 3:
            pair.optimizer.load_state_dict(saved[0])
            pair.oracle.load_state_dict(saved[1])
        x = batch(5, 6, seed=index)
        run(x)
        pair.twin(x).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
        if index == 1:
            saved = [
                torch.utils._pytree.tree_map(
                    lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, o.state_dict()
                )
                for o in (pair.optimizer, pair.oracle)
            ]
    pair.expect_equal()


@pytest.mark.parametrize("rule", ["adamw", "nadam"])
@pytest.mark.parametrize("skipped", [0, 1, 3], ids=["warm-up", "recorded", "replayed"])
def test_a_skipped_step_is_not_counted(rule, skipped):
    """The flag that the replay left on the device is read before the next one's bias corrections are made.

    NAdam's product of momenta, which the host keeps, is then that of the steps that were taken.
    """
    pair = Pair(mlp(6, 8, 4), rule=rule, skip="atomic")
    step = pair.optimizer.capture(stepping(pair.model, pair.optimizer), warmup=1)
    for index in range(6):
        x = batch(5, 6, seed=index)
        step(x if index != skipped else x / 0)
        if index != skipped:
            pair.twin(x).square().mean().backward()
            pair.oracle.step()
            pair.oracle.zero_grad()
    assert pair.optimizer.skipped_steps == 1
    pair.expect_equal()


def test_a_step_that_refreshes_a_projection_runs_as_it_is():
    """By the count of the updates that were taken, without one that was skipped."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, "apollo", lr=1e-2, rank=2, update_proj_gap=4, skip="atomic")
    step = optimizer.capture(stepping(model, optimizer), warmup=1)
    run, refreshed = optimizer._graphs.record, []
    replays = []
    optimizer._graphs.record = lambda *arguments: watched(*run(*arguments), replays)
    for index in range(12):
        x, before = batch(5, 6, seed=index), optimizer.state[model[0].weight]["projection"].clone()
        replays.clear()
        step(x / 0 if index == 3 else x)
        assert len(replays) == (index not in (0, 5, 9))
        if not torch.equal(before, optimizer.state[model[0].weight]["projection"]):
            refreshed.append(index)
    # The step 3 was not taken: the updates 4 and 8 are the steps 5 and 9.
    assert optimizer.skipped_steps == 1
    assert refreshed == [0, 5, 9]


def watched(made, replay, replays):
    return made, lambda: replays.append(replay())


def test_a_stale_graph_is_refused_after_a_replay():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2)
    step = optimizer.capture(stepping(model, optimizer), warmup=1)
    step(batch(5, 6))
    step(batch(5, 6))
    stale = model(batch(5, 6)).sum()
    step(batch(5, 6))
    with pytest.raises(RuntimeError, match="changed between its forward"):
        stale.backward()


def test_what_cannot_be_captured_leaves_everything_as_it_was():
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, "nadam", lr=1e-2)
    calls = []

    def step(x):
        made = stepping(model, optimizer)(x)
        calls.append(x)
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return made

    captured = optimizer.capture(step, warmup=1)
    captured(batch(5, 6))
    before = snapshot(model, optimizer)
    record = optimizer._graphs.record

    def failing(function, table_bytes, generators):
        weights = [p.detach().clone() for p in model.parameters()]
        states = [{k: v.clone() for k, v in s.items() if k.startswith("exp")} for s in optimizer.state.values()]
        try:
            return record(function, table_bytes, generators)
        finally:
            # What was launched into the graph has not run.
            with torch.no_grad():
                for p, weight, state, values in zip(
                    model.parameters(), weights, optimizer.state.values(), states, strict=True
                ):
                    p.copy_(weight)
                    for name, value in values.items():
                        state[name].copy_(value)

    optimizer._graphs.record = failing
    with pytest.raises(
        RuntimeError, match=r"could not be captured as a CUDA graph: operation not permitted .*\.item\(\)"
    ):
        captured(batch(5, 6))
    expect_bit_equal(before, snapshot(model, optimizer))
    stepping(model, optimizer)(batch(5, 6))
    assert all(state["step"] == 2 for state in optimizer.state.values())


def broken(case, model, optimizer, x):
    loss, scaler = model(x).sum(), torch.amp.GradScaler("cpu", enabled=case == "scaler")
    scaler.scale(loss).backward()
    if case == "closure":
        optimizer.step(lambda: model(x).sum())
    elif case == "scaler":
        scaler.step(optimizer)
    elif case != "no step":
        optimizer.step()
    optimizer.zero_grad() if case != "no step" else None
    if case == "two steps":
        optimizer.step()
    if case == "scheduler":
        optimizer.param_groups[0]["lr"] *= 0.5
    return loss.item() if case == "a number" else loss


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ("closure", NotImplementedError, r"step\(closure\) inside capture\(\)"),
        ("scaler", NotImplementedError, r"GradScaler inside capture\(\)"),
        ("two steps", RuntimeError, r"called step\(\) 2 times"),
        ("no step", RuntimeError, r"called step\(\) 0 times"),
        ("scheduler", RuntimeError, "changed inside the captured function"),
        ("a number", TypeError, "returned -?[0-9.]+, which replays would not change"),
    ],
)
def test_a_function_that_would_be_replayed_wrongly(case, error, match):
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2, waiting=True)
    step = optimizer.capture(lambda x: broken(case, model, optimizer, x))
    with pytest.raises(error, match=match):
        step(batch(5, 6))


def test_refused_by_name(monkeypatch):
    monkeypatch.undo()
    model = mlp(6, 4)
    optimizer = forge.attach(model, lr=1e-2)
    with pytest.raises(ValueError, match=r"0\.weight is on cpu; capture\(\) needs every parameter on one CUDA device"):
        optimizer.capture(stepping(model, optimizer))
    optimizer._graphs = Replayer(optimizer)
    with pytest.raises(ValueError, match="warmup=0"):
        optimizer.capture(stepping(model, optimizer), warmup=0)
    step = optimizer.capture(stepping(model, optimizer))
    with pytest.raises(TypeError, match="no tensor and no constant"):
        step(batch(5, 6), object.__new__(type("Unhashable", (), {"__hash__": None})))
    with pytest.raises(ValueError, match="input 0 is on meta, the parameters are on cpu"):
        step(torch.zeros(5, 6, device="meta"))
    model(batch(5, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="a backward is pending"):
        optimizer.capture(stepping(model, optimizer))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match=r"hooks on step\(\)"):
        optimizer.capture(stepping(model, optimizer))
