"""Megatron's ``--use-distributed-optimizer`` with FORGE, against Megatron's own DistributedOptimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, gap, layout, load, poison, run, save, train_both
from megatron_pairs import expect_bit_equal, expect_equal

pytestmark = pytest.mark.timeout(900)

SHARDED = {"use_distributed_optimizer": True}
BASE = Case(steps=4, own_batches=True, optimizer=SHARDED, ddp=SHARDED)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 256}
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches, fused head, tied": replace(BASE, micro_batches=2, tied=True, fused_head=True),
    "in backward, fused head": replace(BASE, clip=0.0, fused_head=True),
    "per-token loss": replace(BASE, micro_batches=2, model={"calculate_per_token_loss": True}),
    "overlap": replace(BASE, clip=0.0, ddp=SHARDED | OVERLAP, optimizer=SHARDED | {"overlap_param_gather": True}),
}


COMPOSED = ("clipped", "micro-batches, fused head, tied")

two, four = Workers(), Workers()


@pytest.fixture(scope="module")
def on_two():
    return two.results(2)


@pytest.fixture(scope="module")
def on_four():
    return four.results(4)


@two
def _pairs() -> dict:
    with layout(tp=1):
        return {name: train_both(case) for name, case in CASES.items()}


@four
def _beside_tensor() -> dict:
    with layout(tp=2):
        return {name: train_both(replace(CASES[name], sequence_parallel=True)) for name in COMPOSED}


@four
def _beside_context() -> dict:
    with layout(tp=1, cp=2):
        return {name: train_both(replace(CASES[name], model={"cp_comm_type": "a2a"})) for name in COMPOSED}


@four
def _beside_stages() -> dict:
    with layout(tp=1, pp=2):
        return {name: train_both(replace(CASES[name], fused_head=False)) for name in COMPOSED}


def test_trains_like_megatron(on_two):
    pairs = on_two["_pairs"]
    expect_equal(pairs, CASES)
    expect_bit_equal(*pairs, CASES)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("_beside_tensor", [(0, 2), (1, 3)]),
        ("_beside_context", [(0, 1), (0, 2), (0, 3)]),
        ("_beside_stages", [(0, 1), (2, 3)]),
    ],
)
def test_beside_other_parallelism(on_four, name, replicas):
    pairs = on_four[name]
    expect_equal(pairs, COMPOSED)
    for one, other in replicas:
        for case in COMPOSED:
            for weight, value in pairs[one][case][1]["weights"].items():
                assert torch.equal(value, pairs[other][case][1]["weights"][weight]), (case, weight)


@two
def _masters() -> tuple[dict, dict]:
    with layout(tp=1):
        return train_both(replace(CASES["clipped"], dtype=torch.bfloat16), recipe="fp32-master")


def test_fp32_masters_in_bf16(on_two):
    """Both step fp32 masters from gradients of bf16 matrix products, so that only their roundings differ."""
    ranks = on_two["_masters"]
    for theirs, ours in ranks:
        assert gap(theirs["losses"], ours["losses"]) <= 2e-3
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=2e-3)
    for name, value in ranks[0][1]["weights"].items():
        assert torch.equal(value, ranks[1][1]["weights"][name]), name


# ---- what is held, and what is refused


@two
def _rows() -> dict:
    with layout(tp=1):
        session = Run(replace(CASES["clipped"], dtype=torch.bfloat16).with_forge(recipe="fp32-master"))
        forge = session.optimizer.chained_optimizers[0].forge
        found = {}
        for p, name in forge.names.items():
            held = {key: tuple(value.shape) for key, value in forge.state[p].items() if value.dim()}
            found[name] = tuple(p.shape), held, sum(v.nbytes for v in forge.state[p].values() if v.dim())
        return {"states": found, "coverage": str(forge.coverage)}


def test_a_rank_holds_its_share_of_the_states(on_two):
    for rank in on_two["_rows"]:
        for name, (shape, held, nbytes) in rank["states"].items():
            half = (shape[0] // 2, *shape[1:])
            assert held == {"exp_avg": half, "exp_avg_sq": half, "master": half}, name
            assert nbytes == 3 * 4 * shape[0] * shape[1] // 2
            (line,) = (line for line in rank["coverage"].splitlines() if line.startswith(name))
            assert f"{nbytes:,}" in line.split()


@two
def _refused() -> dict[str, str]:
    with layout(tp=1):
        errors = {}
        session = Run(BASE.with_forge())
        for name, call in (
            ("torch", session.optimizer.state_dict),
            ("legacy", lambda: session.optimizer.save_parameter_state("x")),
        ):
            try:
                call()
            except NotImplementedError as error:
                errors[name] = str(error)
        return errors


def test_refused_by_name(on_two):
    for errors in on_two["_refused"]:
        assert set(errors) == {"torch", "legacy"}
        assert all("distributed" in error for error in errors.values())
        assert "torch_dist" in errors["torch"]


# ---- skipping


@two
def _skipped() -> tuple[dict, dict, bool]:
    """A gradient that is not finite, on the second rank alone."""
    with layout(tp=1):
        session = Run(replace(CASES["clipped"], clip=1.0).with_forge())
        session.train(1)
        before = _held(session)
        session.backward()
        if dist.get_rank() == 1:
            poison(session, float("nan"))
        stepped, _ = session.step()
        return before, _held(session), stepped


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(on_two):
    for before, after, stepped in on_two["_skipped"]:
        assert not stepped
        _expect_same(before, after)


@two
def _overflow() -> tuple[dict, dict, list, list]:
    """fp16's dynamic loss scale with an infinite owned gradient on the second rank alone."""
    with layout(tp=1):
        case = replace(CASES["clipped"], dtype=torch.float16, optimizer=SHARDED | {"initial_loss_scale": 256.0})
        session = Run(replace(case, optimizer=case.optimizer | {"hysteresis": 1}).with_forge(recipe="fp32-master"))
        session.train(1)
        before, scales = _held(session), [float(session.optimizer.get_loss_scale())]
        session.backward()
        if dist.get_rank() == 1:
            poison(session, float("inf"))
        stepped, _ = session.step()
        scales.append(float(session.optimizer.get_loss_scale()))
        after = _held(session)
        return before, after, scales, [stepped, session.train(1)["norms"][0]]


def test_an_overflow_on_one_rank_lowers_the_loss_scale_on_all(on_two):
    for before, after, scales, (stepped, norm) in on_two["_overflow"]:
        assert not stepped
        assert scales == [256.0, 128.0]
        _expect_same(before, after)
        assert 0 < norm < float("inf")


# ---- checkpoints


# Three columns behind a gate: rows of one state lie in two tensors of a checkpoint, and of four ranks one has none.
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "ffn_hidden_size": 3}
PLAIN = replace(BASE, own_batches=False, clip=0.05, model=GATED, layers=1)
MIXED = replace(PLAIN, dtype=torch.bfloat16)
WHOLE = {"optimizer": {}, "ddp": {}}
WRITERS = {
    "fp32": PLAIN.with_forge(),
    "masters": MIXED.with_forge(recipe="fp32-master"),
    "bf16 states": MIXED.with_forge(),
    "unsharded": replace(PLAIN, **WHOLE).with_forge(),
    "without forge": replace(PLAIN, **WHOLE),
}
READERS = {
    "fp32": ("fp32", "unsharded", "without forge"),
    "masters": ("masters",),
    "bf16 states": ("bf16 states",),
    "unsharded": ("fp32",),
    "without forge": ("fp32",),
}


def _held(session: Run) -> dict[str, torch.Tensor]:
    """Weights, this rank's rows of owned states, and Megatron's own states put together from all ranks."""
    found = {f"weight {name}": value for name, value in session.weights().items()}
    if session.case.forge is None:
        return found
    for optimizer in session.optimizer.chained_optimizers:
        names, dense = optimizer.layout.names, optimizer.dense_held()
        for p, state in optimizer.forge.state.items():
            found |= {f"owned {names[p]} {key}": value.clone() for key, value in state.items()}
        for p in dense.parameters:
            state = {"param": dense.copy(p), **dense.state(p)}
            found |= {f"dense {names[p]} {key}": value.clone() for key, value in state.items()}
    return found


def _write(folder: str) -> dict:
    found = {}
    for name, case in WRITERS.items():
        session = Run(case)
        session.train(2)
        save(session, f"{folder}/{name}")
        found[name] = {"held": _held(session), "next": session.train(1)["weights"]}
        for reader in READERS[name]:
            found[name, reader] = _read(name, reader, folder)
    return found


def _read(name: str, reader: str, folder: str) -> dict:
    session = Run(WRITERS[reader])
    load(session, f"{folder}/{name}")
    return {"held": _held(session), "next": session.train(1)["weights"]}


def _read_all(folder: str) -> dict:
    return {name: _read(name, name, folder) for name in ("fp32", "masters", "bf16 states")}


def _expect_same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def _expect_close(one: dict, other: dict) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=5e-5)


def _joined(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Owned states from the rows of the ranks that have them; what several ranks have whole, once."""
    found = {}
    for name in {name: None for rank in ranks for name in rank}:
        parts = [rank[name] for rank in ranks if name in rank]
        sharded = name.startswith("owned") and parts[0].dim()
        found[name] = torch.cat(parts) if sharded else parts[0]
    return found


def test_checkpoints(tmp_path):
    for name in WRITERS:
        (tmp_path / name).mkdir()
    writers = run(2, _write, str(tmp_path), tp=1)
    for rank in writers:
        for name in ("fp32", "masters", "bf16 states"):
            _expect_same(rank[name]["held"], rank[name, name]["held"])
            _expect_same(rank[name]["next"], rank[name, name]["next"])
            # The batches have ids of the first half of the vocabulary, whose rows are the first rank's.
            moments = {n: v for n, v in rank[name]["held"].items() if "exp_avg" in n and "word_embeddings" not in n}
            assert all(value.abs().max() > 0 for value in moments.values())
        for pair in (
            ("fp32", "unsharded"),
            ("fp32", "without forge"),
            ("unsharded", "fp32"),
            ("without forge", "fp32"),
        ):
            _expect_close(rank[pair[0]]["next"], rank[pair]["next"])
    whole = _joined([rank["fp32"]["held"] for rank in writers])
    for rank in writers:
        _expect_same(whole, rank["fp32", "unsharded"]["held"])
    _expect_same(writers[0]["unsharded"]["held"], _joined([rank["unsharded", "fp32"]["held"] for rank in writers]))
    for world in (1, 4):
        found = run(world, _read_all, str(tmp_path), tp=1)
        for name in ("fp32", "masters", "bf16 states"):
            written = _joined([rank[name]["held"] for rank in writers])
            _expect_same(written, _joined([rank[name]["held"] for rank in found]))
        _expect_close(writers[0]["fp32"]["next"], found[-1]["fp32"]["next"])


MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall"}
EXPERTS = {
    "fp32": replace(PLAIN, model=GATED | MOE).with_forge(),
    # Of experts Megatron's DistributedOptimizer steps nothing: their masters are FORGE's alone.
    "masters": replace(MIXED, model=GATED | MOE).with_forge(recipe="fp32-master"),
    # Without them a checkpoint is asked for no copies of experts.
    "bf16 states": replace(MIXED, model=GATED | MOE).with_forge(),
    "unsharded": replace(MIXED, model=GATED | MOE, **WHOLE).with_forge(),
}
EXPERT_READERS = {"bf16 states": ("bf16 states", "unsharded"), "unsharded": ("unsharded", "bf16 states")}


def _write_experts(folder: str, name: str) -> tuple[dict, dict, dict]:
    session = Run(EXPERTS[name])
    session.train(2)
    save(session, folder)
    held = _held(session)
    return held, _read_experts(folder, name), session.train(1)["weights"]


def _read_experts(folder: str, name: str) -> tuple[dict, dict]:
    session = Run(EXPERTS[name])
    load(session, folder)
    return _held(session), session.train(1)["weights"]


@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts_resume_and_are_read_by_other_ranks(tmp_path, name):
    """Two experts on each of two ranks, twice; then once, so that nothing is left to shard their states over."""
    writers = run(4, _write_experts, str(tmp_path), name, tp=1, ep=2)
    for held, (resumed, then), straight in writers:
        _expect_same(held, resumed)
        _expect_same(straight, then)
    whole = _of_experts([held for held, _, _ in writers])
    assert whole
    for reader in EXPERT_READERS.get(name, (name,)):
        for degrees in ({"ep": 2}, {"ep": 1}):
            readers = run(2, _read_experts, str(tmp_path), reader, tp=1, **degrees)
            _expect_same(whole, _of_experts([held for held, _ in readers]))


def _of_experts(ranks: list[dict]) -> dict[str, torch.Tensor]:
    """States of FORGE's weights, whole, whether or not the ranks have shared them out."""
    found = {}
    for name in sorted({name for rank in ranks for name in rank if name.startswith("owned")}):
        having = [rank for rank in ranks if name in rank]
        parts, weight = [rank[name] for rank in having], having[0][f"weight {name.split()[1]}"]
        whole = not parts[0].dim() or parts[0].shape == weight.shape
        found[name] = parts[0] if whole else torch.cat(parts)
    return found
