"""``capture_train_step`` in a loop of one's own, on one rank: what it follows, what it skips, and what it refuses.

A stand-in replays the device's part, see tests/cpu/replayer.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_harness import Case, Run, Workers

from tests.cpu import replayer

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

CASE = Case(steps=7, micro_batches=2).with_forge()
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(1)


@contextmanager
def stand_in():
    from forge_megatron.capture import Capturing

    real, Capturing.capture = Capturing.capture, replayer.capturing
    try:
        yield
    finally:
        Capturing.capture = real


def _train(case: Case, captures: bool, change=None) -> dict[str, Any]:
    """Seven steps; ``change(index, run, batches)`` comes before each."""
    from forge_megatron.megatron import capture_train_step

    run, told = Run(case), []
    pair = run.optimizer.chained_optimizers[0]
    with stand_in():
        step = capture_train_step(run.optimizer, run.chunks, run.reports) if captures else None
    for index in range(case.steps):
        batches = [run.batch() for _ in range(case.micro_batches)]
        batches = batches if change is None else change(index, run, batches) or batches
        if captures:
            reports, success, norm = step(batches)
        else:
            run.zero()
            reports = run.reports(batches)
            success, norm, _ = run.optimizer.step()
        told.append((torch.stack(reports).tolist(), success, float(norm)))
        if success:
            run.schedule.step(1)
    names = {p: pair.layout.names[p] for p in pair.layout.parameters()}
    states = [{names[p]: dict(state) for p, state in pair.forge.state.items()}]
    states += [{index: dict(state) for index, state in enumerate(pair.dense.optimizer.state.values())}]
    recorded = pair.forge._graphs.recorded if captures else 0
    return {"told": told, "weights": run.weights(), "states": states, "recorded": recorded}


def _both(case: Case, change=None) -> list[dict[str, Any]]:
    return [_train(case, captures, change) for captures in (False, True)]


def expect_equal(eager: dict[str, Any], captured: dict[str, Any]) -> None:
    """Bit for bit; NaN is NaN."""
    for key in ("told", "weights", "states"):
        torch.testing.assert_close(captured[key], eager[key], rtol=0, atol=0, equal_nan=True)


def _rising_decay(index: int, run: Run, batches: list) -> None:
    """Megatron's schedule of both, which writes the groups of both optimizers."""
    schedule = run.schedule
    schedule.start_wd, schedule.end_wd, schedule.wd_incr_steps, schedule.wd_incr_style = 0.0, 0.5, 6, "linear"


@workers
def _weight_decay() -> list[dict[str, Any]]:
    return _both(CASE, _rising_decay)


def test_weight_decay_follows_megatrons_schedule(results):
    eager, captured = results["_weight_decay"][0]
    assert captured["recorded"] == 1
    expect_equal(eager, captured)


def _infinite(index: int, run: Run, batches: list) -> None:
    if index in (1, 5):
        batches[-1]["mask"][0, 0] = torch.inf


def _infinite_in_a_norm(index: int, run: Run, batches: list) -> None:
    """A gradient that Megatron's own optimizer steps, alone."""
    if index == 0:
        run.added = torch.zeros(())
        run.model.decoder.final_layernorm.weight.register_hook(lambda gradient: gradient + run.added)
    run.added.fill_(torch.inf if index in (1, 5) else 0.0)


@workers
def _skips() -> list[list[dict[str, Any]]]:
    return [_both(CASE, change) for change in (_infinite, _infinite_in_a_norm)]


@pytest.mark.parametrize("where", [0, 1], ids=["everywhere", "in a norm's gradient"])
def test_a_norm_that_is_not_finite_skips_the_step_whole(where, results):
    """One in the warm-up, and one that is replayed: nothing is changed or counted, by neither optimizer."""
    eager, captured = results["_skips"][0][where]
    assert [success for _, success, _ in captured["told"]] == [index not in (1, 5) for index in range(7)]
    assert captured["recorded"] == 1
    assert {float(state["step"]) for states in captured["states"] for state in states.values()} == {5.0}
    expect_equal(eager, captured)


def _fewer(index: int, run: Run, batches: list) -> list:
    return batches[: 1 if index % 2 else 2]


@workers
def _micro_batches() -> list[dict[str, Any]]:
    return _both(replace(CASE, steps=10), _fewer)


def test_another_number_of_micro_batches_is_recorded_anew(results):
    eager, captured = results["_micro_batches"][0]
    assert captured["recorded"] == 2
    expect_equal(eager, captured)


def _evaluate(index: int, run: Run, batches: list) -> None:
    run.chunk.eval()
    with torch.no_grad():
        batch = batches[0]
        run.chunk(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    run.chunk.train()


@workers
def _evaluation() -> list[dict[str, Any]]:
    """Where weights are stepped in backward, with a tied head."""
    return _both(replace(CASE, micro_batches=1, clip=0.0, tied=True), _evaluate)


def test_evaluation_lies_between_steps(results):
    expect_equal(*results["_evaluation"][0])


REFUSED = {
    "num_moe_experts": {"model": {"num_moe_experts": 2}},
    "mtp_num_layers": {"model": {"mtp_num_layers": 1}},
    "check_for_nan_in_grad": {"ddp": {"check_for_nan_in_grad": True}},
    "overlap_grad_reduce": {"ddp": {"overlap_grad_reduce": True}},
    "use_distributed_optimizer": {"ddp": {"use_distributed_optimizer": True}},
    "grad_norm_skip_threshold": {},
    "recompute_granularity": {"model": {"recompute_granularity": "selective", "hidden_dropout": 0.1}},
    "loss_scale": {"dtype": torch.bfloat16, "optimizer": {"loss_scale": 8.0}},
    "timers": {},
    "rerun_mode": {},
}


DEGREES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")


@workers
def _refusals() -> dict[str, str]:
    from megatron.core import parallel_state, rerun_state_machine
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    said = {}
    for name, changes in REFUSED.items():
        if name == "use_distributed_optimizer":
            changes = {**changes, "optimizer": {name: True}}
        run = Run(replace(CASE, **changes))
        run.chunk.config.timers = object() if name == "timers" else None
        if name == "grad_norm_skip_threshold":  # megatron-core 0.19's
            run.optimizer.config.grad_norm_skip_threshold = 1e3
        machine = RerunStateMachine(mode=RerunMode.REPORT_DETERMINISM_STATS) if name == "rerun_mode" else None
        with mock.patch.object(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine):
            said[name] = _refusal(run.optimizer, run.chunks)
    run = Run(CASE)
    for degree in DEGREES:
        with mock.patch.object(parallel_state, f"get_{degree}_world_size", return_value=2):
            said[degree] = _refusal(run.optimizer, run.chunks)
    said["unwrapped"] = _refusal(run.optimizer, run.models)
    said["Megatron's own"] = _refusal(run.optimizer.chained_optimizers[0].dense, run.chunks)
    return said


@workers
def _refusals_on_a_gpu() -> list[tuple]:
    """What stands in the way where there is a device that could be asked."""
    from megatron.core import package_info

    from forge_megatron.megatron.capturable import _of_device

    config = Run(replace(CASE, model={"calculate_per_token_loss": True})).model.config
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.object(package_info, "__version__", "0.16.1"):
            return list(_of_device(config))
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_asks_the_device_is_refused(results):
    ((rng, _, way_out), (deterministic, *_), (per_token, _, reason)) = results["_refusals_on_a_gpu"][0]
    assert [rng, deterministic, per_token] == [
        "use_cudagraphable_rng",
        "deterministic_mode",
        "calculate_per_token_loss",
    ]
    assert "model_parallel_cuda_manual_seed()" in way_out
    assert "megatron-core 0.16.1 reads the number of tokens" in reason


def _refusal(optimizer, chunks) -> str:
    from forge_megatron.megatron import capture_train_step

    with stand_in(), pytest.raises(NotImplementedError) as refusal:
        capture_train_step(optimizer, chunks, lambda batches: batches)
    return str(refusal.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, results):
    assert f"  {name}=" in results["_refusals"][0][name]


def test_ranks_and_what_is_not_forges_are_refused(results):
    said = results["_refusals"][0]
    for degree in DEGREES:
        assert f"{degree}_size=2: collectives are not captured" in said[degree]
    assert "model_chunks='GPTModel': wrap the model in Megatron's DistributedDataParallel" in said["unwrapped"]
    assert "optimizer='FP32Optimizer': give the one of get_forge_optimizer()" in said["Megatron's own"]
