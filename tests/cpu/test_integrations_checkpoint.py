"""``torch.distributed.checkpoint`` of an optimizer's states, in the formats that wrote it and in others."""

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import forge_megatron as forge
from forge_megatron.integrations.checkpoint import LoadPlanner
from tests.cpu.training import batch, expect_bit_equal, mean_square, mlp, snapshot


def trained(seed: int, **options):
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, **options)
    mean_square(batch(5, 6, seed=seed))(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(folder, **options):
    model, optimizer = trained(0, **options)
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder, no_dist=True)
    return snapshot(model, optimizer)


def load(folder, model, optimizer):
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(), no_dist=True)
    set_optimizer_state_dict(model, optimizer, state)


@pytest.mark.parametrize(("wrote", "reads"), [("int8", "bf16"), ("fp8", "fp32"), ("fp8", "int8")])
def test_codes_are_not_read_as_numbers(tmp_path, wrote, reads):
    saved(tmp_path, state_format=wrote)
    model, optimizer = trained(1, state_format=reads)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointException, match=r"exp_avg\S*: torch\.\w+ in the checkpoint, torch\.\w+ here"):
        load(tmp_path, model, optimizer)
    expect_bit_equal(before, snapshot(model, optimizer))


@pytest.mark.parametrize(("wrote", "reads"), [("int8", "int8"), ("bf16", "fp32")])
def test_numbers_and_equal_formats_are_read(tmp_path, wrote, reads):
    before = saved(tmp_path, state_format=wrote)
    model, optimizer = trained(1, state_format=reads)
    load(tmp_path, model, optimizer)
    states = slice(len(model.state_dict()), None)
    expect_bit_equal([t.to(u.dtype) for t, u in zip(before, snapshot(model, optimizer), strict=True)][states],
                     snapshot(model, optimizer)[states])  # fmt: skip
