"""A GPT with FORGE against the same GPT with Megatron's own optimizer, one Megatron switch at a time."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron_harness import Case, Run, Workers, gap, load, owned_state, run, save, train, train_both

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

# Gate MG's bound for fp32 over the first 20 steps.
LOSS = 2e-6
TIGHT_CLIP = 0.05
ATTENTION = ("linear_qkv", "linear_proj")

CASES = {
    "clip_grad": Case(),
    "clip_grad small": Case(clip=TIGHT_CLIP),
    "clip_grad off": Case(clip=0.0),
    "num_microbatches": Case(micro_batches=3),
    "num_microbatches without clip": Case(micro_batches=2, clip=0.0),
    "sequence_parallel": Case(sequence_parallel=True),
    "sequence_parallel, clip off": Case(sequence_parallel=True, clip=0.0),
    "calculate_per_token_loss": Case(micro_batches=2, model={"calculate_per_token_loss": True}),
    "per-token loss, clip off": Case(clip=0.0, model={"calculate_per_token_loss": True}),
    "overlap_grad_reduce": Case(micro_batches=2, ddp={"overlap_grad_reduce": True, "bucket_size": 256}),
    "tied": Case(tied=True, sequence_parallel=True),
    "tied, clip off": Case(tied=True, clip=0.0),
    "tied, micro-batches": Case(tied=True, micro_batches=2, sequence_parallel=True),
    "recompute full uniform": Case(
        sequence_parallel=True,
        model={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "recompute full block, clip off": Case(
        clip=0.0, model={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    ),
    "recompute full, distributed, micro-batches": Case(
        micro_batches=2,
        model={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 2,
            "distribute_saved_activations": True,
        },
    ),
    "recompute core_attn, clip off": Case(clip=0.0, model={"recompute_granularity": "selective"}),
    # Without bias: megatron-core's own recomputation of an MLP that returns its bias never ends.
    "recompute mlp, clip off": Case(
        clip=0.0,
        sequence_parallel=True,
        model={"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False},
    ),
    "recompute layernorm, clip off": Case(
        clip=0.0, model={"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    ),
    "fused head": Case(clip=0.0, fused_head=True),
    "fused head, sequence_parallel, micro-batches, clipped": Case(
        sequence_parallel=True, micro_batches=2, clip=TIGHT_CLIP, fused_head=True
    ),
    "fused head, tied": Case(tied=True, sequence_parallel=True, clip=0.0, fused_head=True),
    "grouped query attention": Case(model={"num_query_groups": 2}),
    "swiglu, no bias, RMSNorm": Case(
        clip=0.0,
        sequence_parallel=True,
        model={
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
        },
    ),
}
LONG = Case(steps=20, layers=4, sequence_parallel=True, micro_batches=2)
LONG_TIED = replace(LONG, tied=True)


workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@workers
def _all() -> dict:
    found = {name: train_both(case) for name, case in CASES.items()}
    found["long"] = train_both(LONG)
    found["long, tied"] = train_both(LONG_TIED)
    return found


@pytest.fixture(scope="module")
def pairs(results):
    return results["_all"]


@pytest.mark.parametrize("name", [*CASES, "long", "long, tied"])
def test_trains_like_megatron(pairs, name):
    for rank in range(2):
        theirs, ours = pairs[rank][name]
        assert gap(theirs["losses"], ours["losses"]) <= LOSS
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
        for weight, value in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][weight], value, rtol=0, atol=5e-5)
    assert pairs[0][name][1]["losses"] == pairs[1][name][1]["losses"]


def test_the_curves_move(pairs):
    """A comparison of two models that do not train shows nothing."""
    losses = pairs[0]["long"][0]["losses"]
    assert losses[-1] < losses[0] - 0.3


def test_a_tight_clip_changes_the_run(pairs):
    assert gap(pairs[0]["clip_grad small"][1]["losses"], pairs[0]["clip_grad off"][1]["losses"]) > 100 * LOSS
    assert min(pairs[0]["clip_grad small"][1]["norms"]) > 2 * TIGHT_CLIP


@workers
def _sizes() -> dict:
    names = ("clip_grad small", "sequence_parallel", "tied, micro-batches")
    return {name: train(CASES[name].with_forge()) for name in names}


def test_norms_and_losses_do_not_depend_on_the_tensor_parallel_size(results):
    one, two, four = run(1, _without_sequence_parallel)[0], results["_sizes"][0], run(4, _sizes)[0]
    for name in one:
        for other in (two, four):
            assert other[name]["norms"] == pytest.approx(one[name]["norms"], rel=1e-5)
            assert gap(other[name]["losses"], one[name]["losses"]) <= 1e-5


def _without_sequence_parallel() -> dict:
    names = ("clip_grad small", "sequence_parallel", "tied, micro-batches")
    return {name: train(replace(CASES[name], sequence_parallel=False).with_forge()) for name in names}


@workers
def _bit_equal() -> list:
    case = Case(steps=10, sequence_parallel=True, ddp={"overlap_grad_reduce": True}).with_forge()
    found = []
    for _ in range(2):
        session = Run(case)
        result = session.train()
        states = {
            f"{name}.{key}": value.clone()
            for name, p in session.model.named_parameters()
            for key, value in session.optimizer.chained_optimizers[0].forge.state.get(p, {}).items()
        }
        found.append((result["weights"], states))
    return found


def test_two_runs_are_bit_equal(results):
    """Field row 111."""
    for first, second in [results["_bit_equal"][0]]:
        assert first[1]
        for one, two in zip(first, second, strict=True):
            assert one.keys() == two.keys()
            for name in one:
                assert torch.equal(one[name], two[name]), name


@workers
def _last_micro_batch() -> list:
    found = []
    for clip in (0.0, 1.0):
        session = Run(replace(CASES["num_microbatches without clip"], clip=clip).with_forge())
        weights = [p for forge in session.optimizer._forges for p in forge.forge.owned]
        before = [weight.detach().clone() for weight in weights]
        session.backward()
        stepped = [not torch.equal(*pair) for pair in zip(weights, before, strict=True)]
        session.step()
        coverage = session.optimizer._forges[0].forge.coverage
        found.append((all(stepped), any(stepped), "micro-batch 2 of 2 in its backward" in str(coverage)))
    return found


def test_the_last_micro_batch_is_stepped_in_its_backward(results):
    for found in results["_last_micro_batch"]:
        assert found == [(True, True, True), (False, False, False)]


@workers
def _multi_token_prediction() -> tuple:
    return train_both(Case(clip=0.0, model={"mtp_num_layers": 1})), train_both(
        Case(tied=True, model={"mtp_num_layers": 1})
    )


def test_multi_token_prediction(results):
    for theirs, ours in results["_multi_token_prediction"][0]:
        assert gap(theirs["losses"], ours["losses"]) <= LOSS
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


@workers
def _mixture_of_experts() -> tuple:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}
    case = Case(sequence_parallel=True, model={**experts, "moe_token_dispatcher_type": "allgather"})
    return train_both(case), set(owned_state(Run(case.with_forge())))


def test_sequential_experts_are_stepped_in_backward(results):
    for (theirs, ours), owned in results["_mixture_of_experts"]:
        assert gap(theirs["losses"], ours["losses"]) <= LOSS
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
        attention = {f"decoder.layers.{i}.self_attention.{kind}.weight" for i in (0, 1) for kind in ATTENTION}
        experts = {
            f"decoder.layers.{i}.mlp.experts.local_experts.{expert}.linear_fc{half}.weight"
            for i in (0, 1)
            for expert in range(4)
            for half in (1, 2)
        }
        assert owned == attention | experts | {"embedding.word_embeddings.weight", "output_layer.weight"}


def _ramped(case: Case, last: int, *, save_at: int | None = None, folder: str = "", resume: bool = False) -> tuple:
    """Trains up to step ``last``; the numbers of micro-batches, the losses and the weights at the end.

    Args:
        save_at: the step after which the run is saved in ``folder``.
        resume: begin where ``folder`` ends, after the optimizer was built for another number.
    """
    from megatron.core import num_microbatches_calculator as calculator

    init = calculator.init_num_microbatches_calculator
    # megatron-core 0.19's schedule is by steps, 0.16's by --rampup-batch-size.
    by_steps = "step_batch_size_schedule" in inspect.signature(init).parameters
    ramp = {"step_batch_size_schedule": "0:1 2:2 4:3"} if by_steps else {"rampup_batch_size": [1, 1, 4]}
    sizes = {"global_batch_size": 3, "micro_batch_size": 1, "data_parallel_size": 1}
    init(**{"rank": 1, "rampup_batch_size": None, **sizes, **ramp})
    try:
        session, seen, consumed, losses = Run(case), 0, [], []
        if resume:
            load(session, folder)
        for step in range(1, last + 1):
            calculator.update_num_microbatches(seen, consistency_check=False)
            session.case = replace(case, micro_batches=calculator.get_num_microbatches())
            seen += session.case.micro_batches
            if resume and step <= save_at:
                continue
            consumed.append(session.case.micro_batches)
            losses.append(session.backward())
            session.step()
            if step == save_at:
                save(session, folder)
        return consumed, losses, session.weights()
    finally:
        calculator.unset_num_microbatches_calculator()


@workers
def _ramp() -> tuple:
    """Without clipping, so that nothing but the schedule tells that later windows have several micro-batches."""
    case = Case(clip=0.0)
    return _ramped(case, 5), _ramped(case.with_forge(), 5)


def test_a_batch_that_ramps_up(results):
    for theirs, ours in results["_ramp"]:
        assert theirs[0] == ours[0] == [1, 1, 2, 3, 3]
        assert gap(theirs[1], ours[1]) <= LOSS
        for weight, value in theirs[2].items():
            torch.testing.assert_close(ours[2][weight], value, rtol=0, atol=5e-5)


def test_a_batch_that_ramps_up_is_resumed_bit_for_bit(tmp_path):
    """A weight keeps the factors of two micro-batches and sums up those of three: in bf16 each sum is rounded."""
    # Megatron-LM builds the optimizer for the number that the schedule ends with.
    case = Case(micro_batches=3, layers=1, dtype=torch.bfloat16, model={"hidden_size": 128, "ffn_hidden_size": 128})
    case = case.with_forge(accumulation_dtype=torch.bfloat16)
    through = {"save_at": 2, "folder": str(tmp_path)}
    ((consumed, losses, weights),) = run(1, partial(_ramped, case, 4, **through))
    ((again, resumed_losses, resumed),) = run(1, partial(_ramped, case, 4, **through, resume=True))
    assert consumed == [1, 1, 2, 3]
    assert again == consumed[2:]
    assert resumed_losses == losses[2:]
    for name, value in weights.items():
        assert torch.equal(value, resumed[name]), name
