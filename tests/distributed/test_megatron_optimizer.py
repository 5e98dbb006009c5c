"""The optimizer in Megatron's protocol: norms, skipped steps, schedules, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_harness import BATCH, SEQUENCE, Case, Run, Workers, gap, owned_state, poison, run, train
from megatron_pairs import once_and_rerun

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

FORGE = Case(sequence_parallel=True).with_forge()
BACKWARD = replace(FORGE, clip=0.0)
workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _pair(session: Run):
    return session.optimizer.chained_optimizers[0]


def _snapshot(session: Run) -> dict[str, torch.Tensor]:
    found = session.weights()
    for name, state in owned_state(session).items():
        found.update((f"{name}.{key}", value) for key, value in state.items())
    return found


def _same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@workers
def _not_finite() -> dict:
    session, twin = Run(FORGE), Run(FORGE)
    found = {}
    for this in (session, twin):
        this.train(2)
    before = _snapshot(session)
    session.backward()
    if torch.distributed.get_rank() == 0:
        poison(session, float("nan"))
    found["step"] = session.step()
    found["same"] = _same(before, _snapshot(session))
    twin.backward()  # the same batch, whose step the twin does not make
    found["next"] = [this.train(2)["losses"] for this in (session, twin)]
    return found


def test_a_gradient_that_is_not_finite_skips_the_whole_step(results):
    """Field rows 10 and 88: every weight, state and count as before, on every rank; then on as if it had not been."""
    for found in results["_not_finite"]:
        success, norm = found["step"]
        assert not success
        assert norm != norm
        assert found["same"]
        assert found["next"][0] == found["next"][1]


@workers
def _skip_threshold() -> dict | None:
    from megatron.core.optimizer import OptimizerConfig

    if not hasattr(OptimizerConfig, "grad_norm_skip_threshold"):
        return None
    session = Run(replace(FORGE, optimizer={"grad_norm_skip_threshold": 1e-3}))
    before = _snapshot(session)
    losses = []
    results = []
    for _ in range(2):
        losses.append(session.backward())
        results.append(session.step())
    return {"results": results, "same": _same(before, _snapshot(session)), "waits": _pair(session).waits}


def test_skip_threshold_changes_nothing(results):
    if results["_skip_threshold"] == [None, None]:
        pytest.skip("megatron-core 0.16 has no grad_norm_skip_threshold")
    for found in results["_skip_threshold"]:
        assert [success for success, _ in found["results"]] == [False, False]
        assert all(norm > 1e-3 for _, norm in found["results"])
        assert found["same"]


@workers
def _rerun() -> tuple[list[float], list[float]]:
    return once_and_rerun(FORGE)


def test_rerun_before_step(results):
    for once, twice in results["_rerun"]:
        assert once == twice


@workers
def _update_times() -> dict:
    from megatron.core.rerun_state_machine import RerunMode

    from forge_megatron.megatron import ForgeOptions, get_forge_optimizer

    found = {
        "clip": _pair(Run(FORGE)).waits,
        "no clip": _pair(Run(BACKWARD)).waits,
        "asked": _pair(Run(replace(BACKWARD, forge={"update": "step"}))).waits,
    }
    try:
        Run(replace(FORGE, forge={"update": "backward"}))
    except ValueError as error:
        found["refusal"] = str(error)
    session = Run(BACKWARD)
    _pair(session).forge.detach()
    rerun = get_forge_optimizer(
        session.optimizer.config,
        [session.chunk],
        options=ForgeOptions(),
        rerun_mode=RerunMode.VALIDATE_RESULTS,
        num_microbatches=1,
        use_gloo_process_groups=False,
    )
    found["rerun"] = rerun.chained_optimizers[0].waits
    return found


def test_when_updates_are_made(results):
    for found in results["_update_times"]:
        assert found["clip"]
        assert not found["no clip"]
        assert found["asked"]
        assert found["rerun"]
        assert "clip_grad=1.0" in found["refusal"]


@workers
def _in_backward() -> dict:
    """With nothing to wait for, weights move in backward and step() moves only Megatron's parameters."""
    session = Run(BACKWARD)
    names = set(owned_state(session))
    start = session.weights()
    session.backward()
    after = session.weights()
    session.step()
    end = session.weights()
    kept = sum(owned.factors.nbytes() for owned in _pair(session).forge.owned.values())
    return {
        "moved": {name for name in start if not torch.equal(start[name], after[name])},
        "moved later": {name for name in start if not torch.equal(after[name], end[name])},
        "owned": names,
        "kept": kept,
        "grads": [name for name in names if session.model.get_parameter(name).grad is not None],
        "buffers": [name for name in names if hasattr(session.model.get_parameter(name), "main_grad")],
    }


def test_weights_move_in_backward_without_a_gradient(results):
    for found in results["_in_backward"]:
        assert found["moved"] == found["owned"]
        assert found["moved later"]
        assert not found["moved later"] & found["owned"]
        assert found["kept"] == 0
        assert found["grads"] == []
        assert found["buffers"] == []


@workers
def _groups() -> dict:
    session = Run(replace(FORGE, scheduled=False))
    groups = session.optimizer.param_groups
    names = {id(p): name for name, p in session.model.named_parameters()}
    main = {id(getattr(p, "main_param", p)): name for name, p in session.model.named_parameters()}
    session.schedule.step(1)
    decayed = {
        n for g in groups if g["weight_decay"] > 0 for n in (names.get(id(p)) or main[id(p)] for p in g["params"])
    }
    plain = {
        n for g in groups if g["weight_decay"] == 0 for n in (names.get(id(p)) or main[id(p)] for p in g["params"])
    }
    rates = [g["lr"] for g in groups]
    forge = _pair(session).forge
    for group in groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.1
    before = session.weights()
    session.backward()
    session.optimizer.step()
    return {
        "decayed": decayed,
        "plain": plain,
        "rates": rates,
        "rate": session.schedule.get_lr(forge.param_groups[0]),
        "still": _same(before, session.weights()),
        "dims": {name: p.dim() for name, p in session.model.named_parameters()},
        "all": set(session.weights()),
    }


def test_no_norm_or_bias_is_decayed_and_a_learning_rate_of_zero_moves_nothing(results):
    """Field rows 91 and 93: Megatron's default groups; matrices, embeddings among them, are decayed."""
    for found in results["_groups"]:
        assert found["decayed"] | found["plain"] == found["all"]
        assert {found["dims"][name] for name in found["plain"]} == {1}
        assert {found["dims"][name] for name in found["decayed"]} == {2}
        assert set(found["rates"]) == {found["rate"]}
        assert found["still"]


@workers
def _window_discarded() -> tuple[list, list]:
    session, twin = Run(FORGE), Run(FORGE)
    session.backward()
    session.optimizer.zero_grad()
    twin.batch()
    return session.train(2)["losses"], twin.train(2)["losses"]


def test_zero_grad_drops_what_waits(results):
    for ours, theirs in results["_window_discarded"]:
        assert ours == theirs


def _refusals() -> dict:
    from megatron.core.optimizer import OptimizerConfig

    from forge_megatron.megatron import get_forge_optimizer

    alone = replace(FORGE, sequence_parallel=False)
    session = Run(alone)
    found = {}
    attempts = {
        "count_zeros": session.optimizer.count_zeros,
        "offload": _pair(session).offload_to_cpu,
        "not prepared": lambda: get_forge_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3), [Run(replace(alone, forge=None)).chunk]
        ),
        "option": lambda: Run(replace(alone, forge={"update": "sometimes"})),
        "sgd": lambda: Run(replace(alone, optimizer={"log_num_zeros_in_grad": True})),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_refusals_name_the_cause():
    (found,) = run(1, _refusals)
    assert "log_num_zeros_in_grad" in found["count_zeros"]
    assert found["offload"].startswith("NotImplementedError: offload_to_cpu")
    assert found["not prepared"].startswith("RuntimeError: call forge_megatron.megatron.prepare")
    assert "sometimes" in found["option"]
    assert "log_num_zeros_in_grad=True" in found["sgd"]


@workers
def _refused() -> dict:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron_harness import build_model

    from forge_megatron.megatron import prepare

    model = build_model(Case())
    classes = [type(module) for module in model.modules()]
    try:
        prepare([model], DistributedDataParallelConfig(use_megatron_fsdp=True))
    except NotImplementedError as error:
        same = classes == [type(module) for module in model.modules()]
        return {"error": str(error), "unchanged": same and all(p.requires_grad for p in model.parameters())}


def test_a_refused_switch_is_named_before_anything_changes(results):
    for found in results["_refused"]:
        assert "use_megatron_fsdp=True" in found["error"]
        assert found["unchanged"]


@workers
def _evaluation_between_steps() -> tuple[dict, list, list]:
    session, twin = Run(BACKWARD), Run(BACKWARD)
    ours, theirs = [], []
    for _ in range(3):
        ours.append(session.backward())
        session.step()
        session.model.eval()
        with torch.no_grad():
            positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
            session.model(torch.zeros(BATCH, SEQUENCE, dtype=torch.long), positions, None)
        session.model.train()
        theirs.append(twin.backward())
        twin.step()
    return owned_state(session), ours, theirs


def test_evaluation_changes_nothing(results):
    for states, ours, theirs in results["_evaluation_between_steps"]:
        assert ours == theirs
        assert {int(state["step"]) for state in states.values()} == {3}


def _masters_follow() -> float:
    session = Run(Case(dtype=torch.bfloat16).with_forge(recipe="fp32-master"))
    session.train(1)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.fill_(0.25)
    session.optimizer.reload_model_params()
    return max(float((state["master"] - 0.25).abs().max()) for state in owned_state(session).values())


def test_reload_model_params_refreshes_the_masters():
    assert run(1, _masters_follow) == [0.0]


def test_curves_do_not_depend_on_when_updates_are_made(results):
    ours = results["_both_times"][0]
    assert gap(ours[0]["losses"], ours[1]["losses"]) <= 2e-6
    assert ours[0]["norms"] == pytest.approx(ours[1]["norms"], rel=1e-6)


@workers
def _both_times() -> list:
    return [train(BACKWARD), train(replace(BACKWARD, forge={"update": "step"}))]
