"""``fp8-weight`` under Megatron: one step against its own optimizer, tensor-parallel and data-parallel; checkpoints."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, layout, load, owned_state, run, save

from forge_megatron.formats import Fp8Weight, in_memory

pytestmark = pytest.mark.timeout(300)

# Two blocks a row, so that two tensor-parallel ranks have whole ones; SwiGLU.
SHAPES = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
LR = 1e-3
CASE = Case(layers=1, lr=LR, model=SHAPES)
SHARDED = {"use_distributed_optimizer": True}
# Of a norm and of a matrix: their data-parallel ranks step rows here.
RULES = ("lamb", "muon")
CODES = {"recipe": "fp8-weight", "seed": 3}
LINEARS = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight", "output_layer.weight")

two = Workers()


@pytest.fixture(scope="module")
def results():
    return two.results(2)


def _stored(session: Run) -> dict[str, tuple[torch.Tensor, ...]]:
    forge = session.optimizer.chained_optimizers[0].forge
    stored = {name: in_memory(p) for p, name in forge.names.items() if isinstance(p, Fp8Weight)}
    return {name: tuple(part.clone() for part in parts) for name, parts in stored.items()}


def _one_step(case: Case, rule: str | None = None) -> dict:
    """Beside Megatron's own optimizer; beside a run in fp32 where it has not got the rule."""
    ours = Run(case.with_forge(**CODES, rule=rule))
    before = ours.weights()

    @torch.no_grad()
    def begin(model) -> None:
        for name, p in model.named_parameters():
            p.copy_(before[name])

    theirs = Run(case if rule is None else case.with_forge(rule=rule), begin)
    expected, found = theirs.train(1), ours.train(1)
    return {"stored": _stored(ours), "expected": expected, "found": found, "coverage": str(_coverage(ours))}


def _coverage(session: Run):
    return session.optimizer.chained_optimizers[0].forge.coverage


@two
def _steps() -> dict:
    found = {}
    for name, tp in (("tensor", 2), ("data", 1)):
        with layout(tp=tp):
            case = replace(CASE, own_batches=tp == 1, sequence_parallel=tp == 2)
            for kind, clip in (("", 0.0), (", clipped", 0.05)):
                found[name + kind] = _one_step(replace(case, clip=clip))
            if tp == 1:
                case = replace(case, optimizer=SHARDED, ddp=SHARDED)
            for rule in RULES:
                found[f"{name}, {rule}"] = _one_step(replace(case, clip=0.0), rule)
    return found


def test_each_step_is_that_of_plain_weights_rounded_to_a_neighbour(results):
    for rank in results["_steps"]:
        for case, one in rank.items():
            expected, found = one["expected"], one["found"]
            assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6), case
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
            assert len(one["stored"]) == len(LINEARS)
            assert all(name.endswith(LINEARS) for name in one["stored"])
            for name, (codes, scales) in one["stored"].items():
                exact, got = expected["weights"][name], found["weights"][name]
                scale = scales.float().repeat_interleave(64, 1)[:, : exact.shape[1]]
                apart = torch.maximum((exact.abs().log2().floor() - 3).exp2(), scale * 2.0**-9)
                # A first step is at most about the learning rate, to a rounding of states or of Newton-Schulz in bf16.
                rounding = 2.0**-5 if "muon" in case else 2.0**-7
                assert ((got - exact).abs() <= apart + rounding * LR).all(), (case, name)
                assert f"weight as e4m3 codes of {codes.nbytes + scales.nbytes:,} bytes" in one["coverage"]
    first, second = results["_steps"]
    for case in (case for case in first if case.startswith("data")):
        for name, parts in first[case]["stored"].items():
            assert all(map(torch.equal, parts, second[case]["stored"][name])), (case, name)


def _read(folder: str) -> dict:
    session = Run(replace(CASE, dtype=torch.bfloat16, fused_head=True).with_forge(**CODES))
    load(session, folder)
    return session.weights()


@two
def _resumed() -> dict:
    found = {}
    with layout(tp=2):
        case = replace(CASE, dtype=torch.bfloat16, clip=0.05, fused_head=True)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        straight = Run(case.with_forge(**CODES))
        straight.train(2)
        save(straight, folder[0])
        for name, other in (("resumed", case.with_forge(**CODES)), ("without forge", case)):
            session = Run(other)
            load(session, folder[0])
            found[name] = session.weights()
            if other.forge is not None:
                found["states"] = owned_state(straight), owned_state(session)
                found["then"] = session.train(2)["weights"]
        found["saved"], found["folder"] = straight.weights(), folder[0]
        found["straight"] = straight.train(2)["weights"]
    return found


def test_a_checkpoint_has_the_values_and_is_read_by_any_run(results):
    ranks = results["_resumed"]
    (alone,) = run(1, _read, ranks[0]["folder"], tp=1)
    for rank in ranks:
        for name, value in rank["saved"].items():
            assert torch.equal(value, rank["resumed"][name]), name
            assert torch.equal(value, rank["without forge"][name]), name
            assert torch.equal(rank["straight"][name], rank["then"][name]), name
        one, other = rank["states"]
        for name, state in one.items():
            assert all(torch.equal(value, other[name][key]) for key, value in state.items()), name
    for name, value in alone.items():
        parts = [rank["saved"][name] for rank in ranks]
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            assert torch.equal(torch.cat(parts, 1), value), name
        elif name.endswith(("linear_qkv.weight", "output_layer.weight")):
            assert torch.equal(torch.cat(parts), value), name
