"""Megatron's ``TorchFullyShardedDataParallel`` (FSDP2) with FORGE, and with Megatron's own optimizer."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_harness import Case, Run, Workers, layout, load_schedule, train, train_both
from megatron_pairs import expect_bit_equal, expect_equal, once_and_rerun
from megatron_saving import sharded
from sharded_nets import whole

import forge_megatron

pytestmark = pytest.mark.timeout(900)

BASE = Case(steps=4, own_batches=True, fsdp2=True)
PER_TOKEN = {"calculate_per_token_loss": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SWIGLU = {"gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False}
CASES = {
    "in backward": replace(BASE, clip=0.0),
    "clipped": replace(BASE, clip=0.05),
    "micro-batches": replace(BASE, micro_batches=3),
    "micro-batches, clipped": replace(BASE, micro_batches=2, clip=0.05),
    "gathered until backward": replace(BASE, clip=0.0, ddp={"reshard_after_forward": False}),
    "recomputed": replace(BASE, clip=0.0, model=FULL),
    "recomputed in part": replace(BASE, model={"recompute_granularity": "selective"}),
    "swiglu": replace(BASE, model=SWIGLU),
    "sgd": replace(BASE, optimizer={"optimizer": "sgd"}),
}
BF16 = replace(BASE, dtype=torch.bfloat16)
# A gradient of several micro-batches is summed in bf16 by FSDP2, and in fp32 with FORGE.
HALF = {
    "in backward": replace(BF16, clip=0.0),
    "clipped": replace(BF16, clip=0.05),
    "loss scale": replace(BF16, clip=0.05, optimizer={"loss_scale": 64.0}),
}

workers = Workers()


@pytest.fixture(scope="module")
def results():
    return workers.results(2)


@workers
def _pairs() -> dict:
    with layout(tp=1):
        return {name: train_both(case) for name, case in CASES.items()}


def test_trains_like_megatron(results):
    pairs = results["_pairs"]
    expect_equal(pairs, CASES)
    expect_bit_equal(*pairs, CASES)


@workers
def _masters() -> dict:
    with layout(tp=1):
        return {name: train_both(case, recipe="fp32-master") for name, case in HALF.items()}


def test_fp32_masters_in_bf16(results):
    expect_equal(results["_masters"], HALF)
    expect_bit_equal(*results["_masters"], HALF)


@workers
def _beside_ddp() -> dict:
    """The same data and steps under Megatron's DDP, where FSDP2's wrapper of Megatron has another or no meaning."""
    found = {}
    with layout(tp=1):
        per_token = replace(BASE, micro_batches=2, model=PER_TOKEN)
        found["per-token loss"] = train(replace(per_token, fsdp2=False)), train(per_token.with_forge())
        chosen = {"rule": "lion", "hyperparameters": {"lr": 1e-3, "weight_decay": 0.2}}
        lion = replace(BASE, steps=3, clip=0.0).with_forge(**chosen)
        found["vectors are AdamW's"] = train(replace(lion, fsdp2=False)), train(lion)
    with layout(tp=1, cp=2):
        context = replace(BASE, own_batches=False, micro_batches=2, model={"cp_comm_type": "a2a"})
        found["context parallel"] = train(replace(context, fsdp2=False)), train(context.with_forge())
    return found


@pytest.mark.parametrize("name", ["per-token loss", "vectors are AdamW's", "context parallel"])
def test_trains_as_under_ddp(results, name):
    expect_equal(results["_beside_ddp"], [name])


@workers
def _stochastic() -> tuple[dict, dict]:
    """The bits of forge.attach on the same wrapper, whose tests have them against the whole weight's."""
    case = replace(BF16, clip=0.0, scheduled=False)
    with layout(tp=1):
        ours, other = Run(case.with_forge(recipe="sr-store", seed=3)), Run(case)
        named = list(other.model.named_parameters())
        matrices, vectors = ([pair for pair in named if (pair[1].dim() > 1) is wide] for wide in (True, False))
        groups = [
            {"params": matrices, "weight_decay": 0.1, "recipe": "sr-store"},
            {"params": vectors, "weight_decay": 0.0, "recipe": "fp32-master"},
        ]
        optimizer = forge_megatron.attach(other.chunk, "adamw", groups, lr=0.0, seed=3)
        start = ours.weights()
        for _ in range(3):
            for group in optimizer.param_groups:
                group["lr"] = ours.optimizer.param_groups[0]["lr"]
            ours.backward()
            ours.step()
            other.backward()
            optimizer.step()
        assert not torch.equal(start["output_layer.weight"], ours.weights()["output_layer.weight"])
        return ours.weights(), other.weights()


def test_stochastic_rounding(results):
    for ours, other in results["_stochastic"]:
        for name, value in other.items():
            assert torch.equal(ours[name], value), name


def _pair(session: Run):
    return session.optimizer.chained_optimizers[0]


@workers
def _arrival() -> dict:
    with layout(tp=1):
        session = Run(CASES["in backward"].with_forge())
        before = session.weights()
        session.backward()
        after = session.weights()
        found = {
            "unmoved": [name for name, value in before.items() if torch.equal(value, after[name])],
            "grads": [name for name, p in session.model.named_parameters() if p.grad is not None],
            "stub": _pair(session).dense.is_stub_optimizer,
        }
        session.step()
        found["moved by step()"] = [
            name for name, value in session.weights().items() if not torch.equal(value, after[name])
        ]
        return found


def test_every_parameter_is_stepped_where_its_shard_arrives(results):
    for found in results["_arrival"]:
        assert found == {"unmoved": [], "grads": [], "stub": True, "moved by step()": []}


@workers
def _skipped() -> tuple:
    with layout(tp=1):
        session = Run(CASES["clipped"].with_forge())
        session.train(1)
        before = _state(session)
        session.backward()
        if dist.get_rank() == 1:
            local = session.model.output_layer.weight.grad.to_local()
            local.data[0, 0] = float("nan")
        stepped, _ = session.step()
        return before, _state(session), stepped


def _state(session: Run) -> dict[str, torch.Tensor]:
    forge = _pair(session).forge
    states = {f"{n}.{key}": whole(value) for p, n in forge.names.items() for key, value in forge.state[p].items()}
    return session.weights() | states


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(results):
    for before, after, stepped in results["_skipped"]:
        assert not stepped
        for name, value in before.items():
            assert torch.equal(value, after[name]), name


@workers
def _prepared_without_the_configs() -> tuple:
    """``prepare([model])`` cannot know of FSDP2; what it has kept out of DDP's buffers is FSDP2's and trained."""
    from forge_megatron.megatron import prepare

    with layout(tp=1):
        case = replace(CASES["in backward"], steps=2).with_forge()
        return train(case), Run(case, edit=lambda model: prepare([model])).train()


def test_prepare_without_the_configs(results):
    for told, not_told in results["_prepared_without_the_configs"]:
        assert told["losses"] == not_told["losses"]
        for name, value in told["weights"].items():
            assert torch.equal(value, not_told["weights"][name]), name


@workers
def _frozen() -> list[str]:
    def freeze(model):
        model.embedding.requires_grad_(False)
        model.decoder.layers[0].mlp.requires_grad_(False)

    with layout(tp=1):
        found = []
        for forge in (None, {}):
            session = Run(replace(CASES["clipped"], steps=2, forge=forge), edit=freeze)
            start = session.weights()
            found.append(session.train())
            held = [name for name, value in session.weights().items() if torch.equal(value, start[name])]
        states = len(_pair(session).forge.state)
        return {"pair": tuple(found)}, held, states


def test_frozen_parameters(results):
    expect_equal([pair for pair, _, _ in results["_frozen"]], ["pair"])
    for _, held, states in results["_frozen"]:
        assert held == [
            "embedding.word_embeddings.weight",
            *(f"decoder.layers.0.mlp.linear_{part}.{kind}" for part in ("fc1", "fc2") for kind in ("weight", "bias")),
        ]
        assert states == 28 - len(held)


@workers
def _rerun() -> tuple[list[float], list[float]]:
    with layout(tp=1):
        return once_and_rerun(CASES["clipped"].with_forge())


def test_rerun_before_step(results):
    for once, twice in results["_rerun"]:
        assert once == twice


# ---- checkpoints


def _resumed(case: Case, write, read) -> tuple[dict, dict]:
    first = Run(case)
    first.train(2)
    saved, position = write(first), first.generator.get_state()
    schedule = first.schedule.state_dict()
    first.train(2)
    second = Run(case)
    read(second, saved)
    load_schedule(second, schedule)
    second.generator.set_state(position)
    second.train(2)
    return _state(first), _state(second)


MASTERS = {"recipe": "fp32-master"}
SAVED = {
    "fp32": CASES["clipped"].with_forge(),
    "bf16": HALF["clipped"].with_forge(),
    "masters": HALF["clipped"].with_forge(**MASTERS),
    "lion": CASES["in backward"].with_forge(rule="lion", hyperparameters={"lr": 1e-3}),
}


def _folder() -> str:
    """One for all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


@workers
def _torch_dcp() -> dict:
    """As ``megatron.training`` does with ``--ckpt-format torch_dcp``: tensors are read in place."""

    def write(session):
        state = {"model": session.chunk.state_dict(), "optimizer": session.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=(folder := _folder()))
        return folder

    def read(session, folder):
        optimizer = session.optimizer.state_dict(is_loading=True)
        state = {"model": session.chunk.state_dict(), "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        session.chunk.load_state_dict(state["model"])
        session.optimizer.load_state_dict(state["optimizer"])

    with layout(tp=1):
        return {name: _resumed(case, write, read) for name, case in SAVED.items()}


@workers
def _torch_dist() -> dict:
    """Megatron's dist_checkpointing, which also reads in place, and then ``load_state_dict``."""
    from megatron.core import dist_checkpointing

    def write(session):
        dist_checkpointing.save(sharded(session, is_loading=False), folder := _folder())
        return folder

    def read(session, folder):
        state = dist_checkpointing.load(sharded(session, is_loading=True), folder)
        session.optimizer.load_state_dict(state["optimizer"])

    with layout(tp=1):
        return {name: _resumed(case, write, read) for name, case in SAVED.items()}


@workers
def _without_forge() -> dict:
    """A run with Megatron's own optimizer, then one with FORGE from its state dict, and the other way round."""
    found = {}
    with layout(tp=1):
        for ours in (True, False):
            first = Run(replace(CASES["clipped"], forge=None if ours else {}))
            losses = first.train(2)
            second = Run(replace(CASES["clipped"], forge={} if ours else None))
            second.chunk.module.load_state_dict(first.chunk.state_dict())
            second.optimizer.load_state_dict(first.optimizer.state_dict())
            load_schedule(second, first.schedule.state_dict())
            second.generator.set_state(first.generator.get_state())
            rest = second.train(2)
            theirs = Run(replace(CASES["clipped"], forge=None)).train(4)
            both = {key: losses[key] + rest[key] for key in ("losses", "norms")}
            found["read" if ours else "written"] = theirs, {**both, "weights": rest["weights"]}
    return found


@pytest.mark.parametrize("name", ["read", "written"])
def test_the_state_dict_is_that_of_a_run_without_forge(results, name):
    expect_equal(results["_without_forge"], [name])


@pytest.mark.parametrize("ckpt_format", ["_torch_dcp", "_torch_dist"])
def test_a_resumed_run_is_bit_equal(results, ckpt_format):
    for rank in results[ckpt_format]:
        for name, (first, second) in rank.items():
            for key, value in first.items():
                assert torch.equal(value, second[key]), (name, key)


@workers
def _uneven() -> str:
    with layout(tp=1):
        session = Run(replace(BASE, model={"ffn_hidden_size": 63}).with_forge())
        session.train(1)
        try:
            session.optimizer.sharded_state_dict({})
        except NotImplementedError as error:
            return str(error)


def test_shards_that_are_not_equal_are_not_described_to_dist_checkpointing(results):
    for told in results["_uneven"]:
        assert "linear_fc1" in told
        assert "63 rows into 2 unequal shards" in told
        assert "torch_dcp" in told


# ---- what is refused

REFUSALS = {
    "fused_head": replace(BASE, fused_head=True),
    "share_embeddings_and_output_weights": replace(BASE, tied=True),
    "calculate_per_token_loss": replace(BASE, clip=0.0, model=PER_TOKEN, forge={"update": "backward"}),
    "num_moe_experts=2": replace(BASE, model={"num_moe_experts": 2}),
    "--forge-rule muon": replace(BASE, forge={"rule": "muon"}),
    "--forge-recipe fp8-weight": replace(BF16, forge={"recipe": "fp8-weight"}),
    "--forge-recipe int8": replace(BF16, forge={"recipe": "int8"}),
    "--forge-accumulation-dtype": replace(BF16, forge={"accumulation_dtype": torch.bfloat16}),
}


@workers
def _refused() -> dict[str, str]:
    found = {}
    with layout(tp=1):
        for name, case in REFUSALS.items():
            try:
                Run(case if case.forge else case.with_forge())
            except (NotImplementedError, ValueError) as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name(results, name):
    for told in results["_refused"]:
        assert name in told[name]
