"""Rules that read whole matrices, of which tensor-parallel ranks have shards and data-parallel ranks rows of these."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, Workers, gap, layout, load, owned_state, save

pytestmark = pytest.mark.timeout(300)

SHARDED = {"use_distributed_optimizer": True}
# Two query groups of two heads, and SwiGLU of an odd width.
MODEL = {"num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False, "ffn_hidden_size": 66}
WHOLE = Case(steps=3, lr=1e-2, clip=0.5, model=MODEL, own_batches=True, layers=1)
ROWS = replace(WHOLE, optimizer=SHARDED, ddp=SHARDED)
RULES = {
    "muon": {"adjust_lr_fn": "match_rms_adamw"},
    "lamb": {},
    "adafactor": {},
    "apollo": {"rank": 3, "eps": 1e-3, "update_proj_gap": 2},
}
LOSS = 2e-6

four = Workers()


@pytest.fixture(scope="module")
def results():
    return four.results(4)


@four
def _rules() -> dict:
    found = {}
    with layout(tp=2):
        for rule, options in RULES.items():
            clip = 0.0 if rule in ("lamb", "muon") else 0.5
            for name, case in (("whole", WHOLE), ("rows", ROWS)):
                session = Run(replace(case, clip=clip).with_forge(rule=rule, hyperparameters=options))
                trained = session.train()
                states = owned_state(session).values()
                held = sum(value.nbytes for state in states for key, value in state.items() if key != "step")
                covered = session.optimizer.chained_optimizers[0].forge.coverage.state_bytes
                found[rule, name] = trained, held, covered
    return found


def test_the_update_is_that_of_whole_states(results):
    for rank in results["_rules"]:
        for rule in RULES:
            (whole, _, _), (rows, held, covered) = rank[rule, "whole"], rank[rule, "rows"]
            assert held == covered
            # Newton-Schulz rounds its input to bf16, where the other order of a sum can be the next number.
            rough = rule == "muon"
            assert gap(whole["losses"], rows["losses"]) <= (1e-3 if rough else LOSS), rule
            for name, value in whole["weights"].items():
                ours = rows["weights"][name]
                if rough and value.dim() > 1:
                    assert (ours - value).norm() <= torch.finfo(torch.bfloat16).eps * value.norm(), name
                else:
                    atol = 1e-3 if rough else 1e-6
                    torch.testing.assert_close(ours, value, rtol=1e-6, atol=atol, msg=f"{rule}: {name}")
    for rule in RULES:
        whole, rows = (sum(rank[rule, name][1] for rank in results["_rules"]) for name in ("whole", "rows"))
        assert rows < whole or rule == "adafactor"


@four
def _resumed() -> dict:
    """Data-parallel ranks alone, beside tensor parallelism, and by a run that shards nothing."""
    found = {}
    for tp, rule, recipe in ((1, "adam_mini", "int8"), (2, "muon", "fp32-master")):
        with layout(tp=tp):
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)
            options = {"rule": rule, "hyperparameters": RULES.get(rule, {}), "recipe": recipe}
            case = replace(ROWS, own_batches=False, dtype=torch.bfloat16).with_forge(**options)
            straight = Run(case)
            straight.train(2)
            save(straight, folder[0])
            resumed = Run(case)
            load(resumed, folder[0])
            whole = Run(replace(case, optimizer={}, ddp={}))
            load(whole, folder[0])
            saved = owned_state(straight), owned_state(resumed), owned_state(whole)
            found[rule] = *saved, straight.train(1)["weights"], resumed.train(1)["weights"]
    return found


def test_checkpoints(results):
    ranks = results["_resumed"]
    for rule, (saved, restored, whole, straight, resumed) in (pair for rank in ranks for pair in rank.items()):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), (rule, name)
        for name, state in saved.items():
            for key, value in state.items():
                assert torch.equal(value, restored[name][key]), (rule, name, key)
                if value.shape == whole[name][key].shape:
                    assert torch.equal(value, whole[name][key]), (rule, name, key)
    # Ranks 0 and 2 have the same shards, and rows of them.
    (first, _, whole, *_), (second, *_) = ranks[0]["muon"], ranks[2]["muon"]
    for name, state in whole.items():
        for key, value in state.items():
            if value.dim():
                assert torch.equal(torch.cat([first[name][key], second[name][key]]), value), (name, key)
