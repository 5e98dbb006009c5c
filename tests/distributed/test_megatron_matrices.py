"""Rules that read more than one coordinate under Megatron: what a fused weight holds, and two ranks against one."""

from __future__ import annotations

import tempfile

import pytest
import torch
from megatron_harness import Case, Run, Workers, gap, layout, load, owned_state, save

# The processes of a file start once and share the machine with others.
pytestmark = pytest.mark.timeout(900)

MUON = {"rule": "muon", "hyperparameters": {"adjust_lr_fn": "match_rms_adamw"}}
# Two query groups of two heads, and SwiGLU.
MODEL = {"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False}
# Gate MG's bound for fp32.
LOSS = 2e-6
alone, pair = Workers(), Workers()


@pytest.fixture(scope="module")
def results():
    return alone.results(1)


@pytest.fixture(scope="module")
def on_two():
    return pair.results(2)


def rows_of(name: str, rows: int) -> list[list[int]]:
    """The rows of each matrix in a weight, from the layout that Megatron documents; heads have 8 rows here."""
    if name.endswith("linear_fc1.weight"):
        return [list(range(rows // 2)), list(range(rows // 2, rows))]
    if not name.endswith("linear_qkv.weight"):
        return [list(range(rows))]
    groups = [range(start, start + 32) for start in (0, 32)]
    return [
        [r for group in groups for r in group[:16]],
        [r for group in groups for r in group[16:24]],
        [r for group in groups for r in group[24:]],
    ]


class Beside:
    """Megatron's own optimizer, with some of its weights stepped by torch's Muon, each matrix as a parameter."""

    def __init__(self, session: Run, names: set[str]):
        optimizer = session.optimizer.chained_optimizers[0].optimizer
        self.groups = optimizer.param_groups
        self.parts = []
        for name, p in session.model.named_parameters():
            index = next(i for i, group in enumerate(self.groups) if any(q is p for q in group["params"]))
            for rows in rows_of(name, p.shape[0]) if name in names else []:
                part = torch.nn.Parameter(p.detach()[rows].clone())
                self.parts.append((p, rows, part, torch.optim.Muon([part], adjust_lr_fn="match_rms_adamw"), index))
        self.theirs, optimizer.step = optimizer.step, self.step

    @torch.no_grad()
    def step(self):
        for p, rows, part, muon, index in self.parts:
            muon.param_groups[0].update({key: self.groups[index][key] for key in ("lr", "weight_decay")})
            part.grad = p.grad[rows]
            muon.step()
            p[rows] = part
        for p in {id(p): p for p, *_ in self.parts}.values():
            p.grad = None
        self.theirs()


@alone
def _muon() -> dict:
    case = Case(steps=3, lr=1e-3, clip=0.0, model=MODEL)
    ours = Run(case.with_forge(**MUON))
    optimizer = ours.optimizer.chained_optimizers[0]
    by_muon = {name for name, state in owned_state(ours).items() if "momentum_buffer" in state}
    rules = {group["rule"] for group in optimizer.forge.param_groups}
    theirs = Run(case)
    Beside(theirs, by_muon)
    return {"ours": ours.train(), "theirs": theirs.train(), "muon": by_muon, "rules": rules}


def test_muon_steps_the_matrices_in_fused_weights_and_adamw_the_output_layer(results):
    (found,) = results["_muon"]
    assert found["rules"] == {"muon", "adamw"}
    assert {name.rpartition("layers.")[2] for name in found["muon"]} == {
        f"{layer}.{name}.weight"
        for layer in (0, 1)
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    # A bf16 rounding of an entry of Newton-Schulz's input, by the other order of a sum.
    assert gap(found["ours"]["losses"], found["theirs"]["losses"]) <= 1e-3
    for name, value in found["theirs"]["weights"].items():
        largest = 1e-3 * 0.2 * max(value.shape) ** 0.5
        atol = 3 * largest * 4 * torch.finfo(torch.bfloat16).eps if name in found["muon"] else 2e-5
        torch.testing.assert_close(found["ours"]["weights"][name], value, rtol=0, atol=atol, msg=name)


@alone
def _resumed() -> dict:
    found = {}
    for rule in ("muon", "adafactor", "apollo"):
        options = {"rank": 3, "update_proj_gap": 3} if rule == "apollo" else {}
        case = Case(lr=1e-3, clip=0.0).with_forge(rule=rule, hyperparameters=options)
        folder = tempfile.mkdtemp()
        straight = Run(case)
        straight.train(2)
        save(straight, folder)
        saved = owned_state(straight)
        resumed = Run(case)
        load(resumed, folder)
        found[rule] = saved, owned_state(resumed), straight.train(2), resumed.train(2)
    return found


def test_a_resumed_run_is_bit_equal_with_statistics_of_whole_layers(results):
    (found,) = results["_resumed"]
    for rule, (saved, restored, straight, resumed) in found.items():
        for name, state in saved.items():
            for key, value in state.items():
                assert torch.equal(value, restored[name][key]), (rule, name, key)
        for name, value in straight["weights"].items():
            assert torch.equal(value, resumed["weights"][name]), (rule, name)


# Each as Megatron's --forge-rule, in backward and (clip) waiting for step().
RULES = {
    "muon": {"adjust_lr_fn": "match_rms_adamw"},
    "lamb": {},
    "lars": {"trust_coefficient": 0.1},
    "scion": {},
    "adafactor": {},
    "adalomo": {},
    "adam_mini": {},
    "sm3": {},
    # An eps near a typical gradient: what is near zero in the projection is no sign then.
    "galore": {"rank": 3, "eps": 1e-3, "proj": "svd"},
    "apollo": {"rank": 3, "eps": 1e-3, "update_proj_gap": 2},
    "apollo_mini": {"eps": 1e-3},
}


def cut(name: str, whole: torch.Tensor) -> torch.Tensor:
    """A rank's shard, as Megatron documents it."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(size, 1)[rank]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    sharded = name.endswith(("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight"))
    return whole.chunk(size)[rank] if sharded else whole


@torch.no_grad()
def begin(model) -> None:
    """The same weights for every tensor-parallel size."""
    size, generator = torch.distributed.get_world_size(), torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        shape = list(p.shape)
        if p.tensor_model_parallel:
            shape[p.partition_dim] *= size
        p.copy_(cut(name, torch.randn(shape, generator=generator) * 0.1))


def _of_rules() -> dict:
    found = {}
    for index, (rule, options) in enumerate(RULES.items()):
        size = torch.distributed.get_world_size()
        case = Case(
            steps=3, lr=1e-2, clip=0.5 if index % 2 else 0.0, model=MODEL, sequence_parallel=size > 1 and index % 3 == 0
        )
        run = Run(case.with_forge(rule=rule, hyperparameters=options), begin)
        trained = run.train()
        statistics = {
            name: {
                key: value
                for key, value in state.items()
                if value.dim() and value.shape != trained["weights"][name].shape
            }
            for name, state in owned_state(run).items()
        }
        found[rule] = trained, statistics
    return found


@alone
def _on_one() -> dict:
    return _of_rules()


@pair
def _on_two() -> dict:
    return _of_rules()


def test_the_update_is_that_of_tensor_parallel_size_1(results, on_two, monkeypatch):
    (one,) = results["_on_one"]
    for rank, two in enumerate(on_two["_on_two"]):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for rule in RULES:
            (alone_, whole_statistics), (together, statistics) = one[rule], two[rule]
            # Newton-Schulz rounds its input to bf16, where the other order of a sum can be the next number.
            rough = rule in ("muon", "scion")
            assert gap(alone_["losses"], together["losses"]) <= (1e-3 if rough else LOSS), rule
            for name, value in alone_["weights"].items():
                ours, theirs = together["weights"][name], cut(name, value)
                if rough and value.dim() > 1:
                    assert (ours - theirs).norm() <= torch.finfo(torch.bfloat16).eps * theirs.norm(), (rule, name)
                else:
                    atol = 1e-3 if rough else 1e-6
                    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=atol, msg=f"{rule}: {name}")
            # Whole, and in the order of one rank: a checkpoint of any size has them so.
            # Singular vectors have a sign of their own.
            for name, whole in whole_statistics.items() if rule != "galore" else ():
                for key, value in whole.items():
                    # A projection is a sum of terms of both signs.
                    atol = 1e-6 * value.abs().max().item() if rule.startswith("apollo") else 1e-12
                    torch.testing.assert_close(
                        statistics[name][key], value, rtol=1e-5, atol=atol, msg=f"{rule}: {name} {key}"
                    )


@pair
def _stages() -> dict:
    """A layer's statistics lie on its stage; the first rank writes what is not sharded."""
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    with layout(tp=1, pp=2):
        case = Case(lr=1e-3, micro_batches=2).with_forge(rule="adafactor")
        straight = Run(case)
        straight.train(2)
        save(straight, folder[0])
        resumed = Run(case)
        load(resumed, folder[0])
        return owned_state(straight), owned_state(resumed), straight.train(2), resumed.train(2)


def test_every_stage_of_a_pipeline_finds_its_statistics_again(on_two):
    for saved, restored, straight, resumed in on_two["_stages"]:
        assert any("row_var" in state for state in saved.values())
        for name, state in saved.items():
            for key, value in state.items():
                assert torch.equal(value, restored[name][key]), (name, key)
        for name, value in straight["weights"].items():
            assert torch.equal(value, resumed["weights"][name]), name
