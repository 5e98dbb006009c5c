"""The table of Megatron switches: what is refused, what waits, and that every row names a test that exists."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_megatron.megatron.switches import (
    REFUSED,
    SUPPORTED,
    SWITCHES,
    WAITS,
    Facts,
    check,
    markdown,
    reasons_to_wait,
)

ROOT = Path(__file__).resolve().parents[2]

# What switches each row on, as Megatron's configs spell it.
ON = {
    "expert_model_parallel_size": 2,
    "gtp_weight_remat_size": 2,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "cuda_graph_impl": "local",
    "optimizer": "muon",
    "save_wgrads_interval": 10,
    "decoupled_weight_decay": False,
}
OFF = {
    "expert_model_parallel_size": 1,
    "gtp_weight_remat_size": 1,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "optimizer": "adam",
    "save_wgrads_interval": None,
    "decoupled_weight_decay": True,
}
REFUSED_NAMES = [switch.name for switch in SWITCHES if switch.verdict == REFUSED]


def facts(**switches) -> Facts:
    configs = (SimpleNamespace(**switches),)
    return Facts(configs)


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_refused_by_name(name):
    value = ON.get(name, True)
    with pytest.raises(NotImplementedError, match=rf"{name}={value!r}"):
        check(facts(**{name: value}))


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_off_is_not_refused(name):
    check(facts(**{name: OFF.get(name, False)}))


def test_a_flag_is_found_in_whichever_config_holds_it():
    with pytest.raises(NotImplementedError, match="use_megatron_fsdp"):
        check(Facts((SimpleNamespace(use_megatron_fsdp=False), SimpleNamespace(use_megatron_fsdp=True))))


NOT_FULLY_SHARDED = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_moe_experts": 4,
    "mtp_num_layers": 1,
    "use_distributed_optimizer": True,
    "gradient_accumulation_fusion": True,
    "fp16": True,
    "init_model_with_meta_device": True,
}


@pytest.mark.parametrize("name", NOT_FULLY_SHARDED)
def test_refused_beside_fsdp2_alone(name):
    configs = (SimpleNamespace(**{name: NOT_FULLY_SHARDED[name]}),)
    check(Facts(configs))
    with pytest.raises(NotImplementedError, match=rf"{name}={NOT_FULLY_SHARDED[name]} with use_torch_fsdp2"):
        check(Facts(configs, fully_sharded=True))


@pytest.mark.parametrize("kept", ["save", "load"])
def test_a_checkpoint_that_would_count_steps_anew(kept):
    configs = (SimpleNamespace(**{kept: "folder", "ckpt_format": "torch_dist"}),)
    check(Facts(configs))
    with pytest.raises(NotImplementedError, match="--ckpt-format torch_dcp"):
        check(Facts(configs, fully_sharded=True))
    check(Facts((SimpleNamespace(**{kept: "folder", "ckpt_format": "torch_dcp"}),), fully_sharded=True))
    check(Facts((SimpleNamespace(ckpt_format="torch_dist"),), fully_sharded=True))


def test_every_refused_switch_is_named_at_once():
    with pytest.raises(NotImplementedError) as refusal:
        check(facts(fp8="hybrid", gtp_weight_remat_size=4))
    assert "fp8='hybrid'" in str(refusal.value)
    assert "gtp_weight_remat_size=4" in str(refusal.value)


@pytest.mark.parametrize(
    ("switches", "extra", "reason"),
    [
        ({"clip_grad": 1.0}, {}, "clip_grad=1.0"),
        ({}, {"num_microbatches": 4}, "num_microbatches=4"),
        ({"calculate_per_token_loss": True}, {}, "calculate_per_token_loss=True"),
        ({"fp16": True}, {}, "fp16=True"),
        ({"loss_scale": 128.0}, {}, "loss_scale=128.0"),
        ({"grad_norm_skip_threshold": 10.0}, {}, "grad_norm_skip_threshold=10.0"),
        ({}, {"rerun_mode": "validate_results"}, "rerun_mode='validate_results'"),
    ],
)
def test_waits_for_step(switches, extra, reason):
    assert reasons_to_wait(Facts((SimpleNamespace(**switches),), **extra)) == [reason]


def test_updates_in_backward_when_nothing_waits():
    quiet = {
        "clip_grad": 0.0,
        "grad_norm_skip_threshold": float("inf"),
        "fp16": False,
        "loss_scale": None,
        "recompute_granularity": "full",
        "sequence_parallel": True,
        "tensor_model_parallel_size": 8,
    }
    assert reasons_to_wait(facts(**quiet)) == []
    check(facts(**quiet))


def test_megatrons_default_clip_waits():
    assert reasons_to_wait(facts(clip_grad=1.0)) != []


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_every_row_names_an_existing_test(switch):
    assert switch.verdict in (SUPPORTED, WAITS, REFUSED)
    path, _, function = switch.test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_names_are_unique_and_in_the_markdown_table():
    names = [switch.name for switch in SWITCHES]
    assert len(set(names)) == len(names)
    table = markdown()
    assert all(f"| `{name}` |" in table for name in names)
    assert len(table.splitlines()) == len(names) + 2
