"""16-bit training: recipes beside Megatron's fp32 masters, and loss scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_harness import Case, Run, Workers, gap, layout, owned_state, poison, train, train_both

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

# A model this small turns one rounding of a bf16 weight into 1e-3 of loss, so a curve is judged against the
# distance of Megatron's from its own with the sums of a batch in another order; the moments are judged tightly.
APART = 2.0
BF16 = Case(steps=20, dtype=torch.bfloat16, lr=2e-4, sequence_parallel=True, micro_batches=2)
SCALER = {"initial_loss_scale": 2.0**10, "min_loss_scale": 1.0, "loss_scale_window": 3, "hysteresis": 2}
FP16 = Case(steps=5, dtype=torch.float16, lr=1e-3, optimizer=SCALER)


workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


def _reordered(case: Case) -> dict:
    """Megatron's own run with the samples of each batch swapped: every sum over tokens in another order."""
    session = Run(case)
    batch = session.batch
    session.batch = lambda: {name: rows.flip(0) for name, rows in batch().items()}
    return session.train()


def _tied_sum() -> torch.dtype:
    """What the embedding's part of an owned tied weight is summed in over micro-batches."""
    session = Run(replace(BF16, tied=True).with_forge(recipe="fp32-master"))
    return session.model.get_parameter("embedding.word_embeddings.weight").grad_dtype


@workers
def _bf16() -> dict:
    return {
        "reordered": _reordered(BF16),
        "master": train_both(BF16, recipe="fp32-master"),
        "master, tied, in backward": train_both(
            replace(BF16, tied=True, clip=0.0, micro_batches=1), recipe="fp32-master"
        ),
        "master, tied, micro-batches": train_both(replace(BF16, tied=True), recipe="fp32-master"),
        "tied sum": _tied_sum(),
        "scaled": train(replace(BF16, optimizer={"loss_scale": 128.0}).with_forge(recipe="fp32-master")),
        "bf16-state": train(BF16.with_forge(recipe="bf16-state")),
        "none": train(BF16.with_forge()),
    }


@pytest.fixture(scope="module")
def bf16(results):
    return results["_bf16"][0]


@pytest.mark.parametrize("name", ["master", "master, tied, in backward", "master, tied, micro-batches"])
def test_fp32_master_trains_like_megatrons(bf16, name):
    theirs, ours = bf16[name]
    noise = gap(bf16["master"][0]["losses"], bf16["reordered"]["losses"])
    assert noise < 5e-3
    assert gap(theirs["losses"], ours["losses"]) <= APART * noise
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=5e-3)


def test_a_tied_weights_micro_batches_are_summed_in_fp32(bf16):
    assert bf16["tied sum"] is torch.float32


@workers
def _moments() -> dict:
    """exp_avg, exp_avg_sq and fp32 master of one weight after four steps: Megatron's and FORGE's."""
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    case = replace(BF16, clip=0.5, lr=1e-4)
    theirs, ours = Run(case), Run(case.with_forge(recipe="fp32-master"))
    for session in (theirs, ours):
        session.train(4)
    main = theirs.model.get_parameter(name).main_param
    state = theirs.optimizer.chained_optimizers[0].optimizer.state[main]
    start = Run(case).model.get_parameter(name).main_param
    return {
        "theirs": {**{key: state[key] for key in ("exp_avg", "exp_avg_sq")}, "master": (main - start).detach()},
        "ours": {**owned_state(ours)[name], "master": owned_state(ours)[name]["master"] - start.detach()},
    }


def test_moments_and_masters_are_megatrons(results):
    """Megatron rounds each micro-batch's gradient to bf16 (relative error 2^-9), FORGE does not."""
    for found in results["_moments"]:
        for key, value in found["theirs"].items():
            assert (found["ours"][key] - value).norm() <= 0.02 * value.norm(), key


def test_constant_loss_scale(bf16):
    """A power of two is exact in bf16, so the scaled run is the unscaled one."""
    assert bf16["scaled"]["losses"] == bf16["master"][1]["losses"]
    assert bf16["scaled"]["norms"] == pytest.approx(bf16["master"][1]["norms"], rel=1e-6)


def test_the_default_recipe_is_the_parameters_dtype(bf16):
    assert bf16["none"]["losses"] == bf16["bf16-state"]["losses"]
    assert bf16["none"]["losses"] != bf16["master"][1]["losses"]


@workers
def _fp16() -> tuple[dict, dict]:
    return train_both(FP16, recipe="fp32-master")


def test_fp16_trains_like_megatrons(results):
    theirs, ours = results["_fp16"][0]
    assert gap(theirs["losses"], ours["losses"]) <= 3.8e-4
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=5e-3)


def _snapshot(session: Run) -> dict[str, torch.Tensor]:
    found = session.weights()
    for name, state in owned_state(session).items():
        found.update((f"{name}.{key}", value) for key, value in state.items())
    return found


@workers
def _overflow() -> dict:
    """Scales that overflow at first, with Megatron's optimizer and with FORGE."""
    case = replace(FP16, optimizer={**SCALER, "initial_loss_scale": 2.0**40})
    found = {}
    for kind, this in (("theirs", case), ("ours", case.with_forge(recipe="fp32-master"))):
        session = Run(this)
        steps = []
        for _ in range(60):
            before = _snapshot(session) if kind == "ours" else None
            scale = float(session.optimizer.get_loss_scale())
            session.backward()
            success, norm = session.step()
            same = None
            if before is not None:
                after = _snapshot(session)
                same = all(torch.equal(before[name], after[name]) for name in before)
            steps.append((scale, success, norm is None, same))
        found[kind] = steps
    return found


def test_loss_scale_overflow_skips_the_whole_step(results):
    for found in results["_overflow"]:
        # Megatron rounds a weight gradient to fp16, where it overflows once more than in fp32.
        together = next(index for index, step in enumerate(found["ours"]) if step[1])
        assert together > 5
        assert [step[:3] for step in found["ours"][:together]] == [step[:3] for step in found["theirs"][:together]]
        skipped = [step for step in found["ours"] if not step[1]]
        made = [step for step in found["ours"] if step[1]]
        assert len(skipped) > 5
        assert len(made) > 5
        assert all(step[3] for step in skipped)
        assert not any(step[3] for step in made)


@workers
def _overflow_in_one_owned_weight() -> dict:
    session = Run(FP16.with_forge(recipe="fp32-master"))
    session.train(1)
    scale = float(session.optimizer.get_loss_scale())
    before = _snapshot(session)
    results = []
    for _ in range(2):  # hysteresis
        session.backward()
        if torch.distributed.get_rank() == 1:
            poison(session, float("inf"))
        results.append(session.step())
    after = _snapshot(session)
    return {
        "results": results,
        "same": all(torch.equal(before[name], after[name]) for name in before),
        "scales": (scale, float(session.optimizer.get_loss_scale())),
    }


def test_an_overflow_on_one_rank_backs_the_scale_off_on_all(results):
    for found in results["_overflow_in_one_owned_weight"]:
        assert found["results"] == [(False, None), (False, None)]
        assert found["same"]
        assert found["scales"][1] < found["scales"][0]


@workers
def _overflow_beside_experts() -> list[tuple[dict, dict]]:
    """A step after the scale of 2**10 was backed off once, and the same of a run that began with that scale."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    case = replace(FP16, model={**experts, "moe_token_dispatcher_type": "alltoall"}).with_forge(recipe="fp32-master")
    halved = replace(case, optimizer={**SCALER, "initial_loss_scale": 2.0**9})
    found = []
    for pair in (0, 1):
        with layout(tp=1, ep=2):
            session, expected = Run(case), Run(halved)
            for _ in range(2):  # hysteresis
                expected.backward()
                session.backward()
                if torch.distributed.get_rank() == 1:
                    poison(session, float("inf"), pair)
                assert session.step() == (False, None)
            found.append((session.train(1), expected.train(1)))
            chain = session.optimizer
            scales = {float(optimizer.get_loss_scale()) for optimizer in chain.chained_optimizers}
            assert scales == {2.0**9}, (pair, scales)
            # A checkpoint of a run whose scales came apart: the loss was multiplied by the first.
            scaler = chain.chained_optimizers[1].dense.grad_scaler
            scaler._scale = scaler._scale * 4
            found.append((session.train(1), expected.train(1)))
    return found


def test_an_overflow_backs_the_one_loss_scale_off_for_experts_and_dense_weights(results):
    """Megatron's own optimizers of a chain have a scale each, and unscale by it what the first's has scaled."""
    for pairs in results["_overflow_beside_experts"]:
        for ours, expected in pairs:
            assert ours["norms"] == pytest.approx(expected["norms"], rel=1e-4)
            for name, value in expected["weights"].items():
                torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=2e-4)
