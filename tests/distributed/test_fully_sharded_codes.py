"""8-bit states of weights that ``fully_shard`` has sharded, against whole weights in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run
from sharded_nets import contents
from test_fully_sharded_checkpoint import load
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import forge_megatron as forge
from forge_megatron.kernels import local

pytestmark = pytest.mark.timeout(300)

#: Rows of two blocks and a bit, of one block and a bit, and fewer than ranks; a rank may have none.
SHAPES = ((7, 130), (3, 2, 70), (1, 64), (130,), (5,))
OPTIONS = {
    "int8": {"recipe": "int8"},
    "fp8": {"state_format": "fp8", "weight_store": "master"},
    "stochastic": {"rule": "lion", "state_format": "int8", "weight_store": "stochastic", "clip_grad_norm": 1e9},
}


class Constants(nn.Module):
    """Its gradients are the same on every rank, so that any number of ranks has the same mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(shape).bfloat16() for shape in SHAPES)

    def forward(self, scale):
        return sum((w * (scale * torch.linspace(0.5, 2.0, w.numel()).to(w).view(w.shape))).sum() for w in self.weights)


def made(options: dict, *, sharded: bool, grouped: bool = True):
    """Vectors, which shards cut at any coordinate, keep fp32 states there, unless a group says so anyway."""
    net = Constants()
    if sharded:
        fully_shard(net)
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "state_format": "fp32"},
    ]
    return net, forge.attach(net, params=groups if grouped else None, lr=1e-2, seed=3, **options)


def take(net, optimizer, steps):
    for number in steps:
        net(torch.tensor(0.5 + number, dtype=torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(net, optimizer) -> dict[str, torch.Tensor]:
    """What this rank has of weights and states; gloo gathers no e4m3."""
    found = {name: local(p).detach().clone() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        found.update((f"{name} {key}", local(value).clone()) for key, value in optimizer.state[p].items())
    return found


def joined(ranks: list[dict]) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([rank[name].float() for rank in ranks]) if value.dim() else value
        for name, value in ranks[0].items()
    }


def expect_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.float(), other[name].float()), name


def _read(folder: str) -> dict:
    found = {}
    for name, options in OPTIONS.items():
        net, optimizer = made(options, sharded=True, grouped=False)
        take(net, optimizer, range(1))
        load(net, optimizer, f"{folder}/{name}")
        found[name] = parts(net, optimizer)
        take(net, optimizer, range(2, 4))
        found[f"{name} then"] = parts(net, optimizer)
    return found


def _save(folder: str) -> dict:
    found = {}
    for name, options in OPTIONS.items():
        net, optimizer = made(options, sharded=True, grouped=False)
        take(net, optimizer, range(2))
        model, states = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{folder}/{name}")
        found[name] = parts(net, optimizer)
        take(net, optimizer, range(2, 4))
        found[f"{name} then"] = parts(net, optimizer)
        held = [local(value) for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert optimizer.coverage.state_bytes == sum(value.nbytes for value in held)
        whole, single = made(options, sharded=False)
        take(whole, single, range(4))
        found[f"{name} alone"] = parts(whole, single)
    for name, value in _read(folder).items():
        expect_same(found[name], value)
    return found


def test_codes_and_scales_are_those_of_the_whole_and_are_resumed_by_half_the_ranks(tmp_path):
    ranks = run(2, _save, str(tmp_path))
    (half,) = run(1, _read, str(tmp_path))
    for name in OPTIONS:
        alone = ranks[0][f"{name} alone"]
        written = {key: joined([rank[f"{name}{key}"] for rank in ranks]) for key in ("", " then")}
        expect_same(written[" then"], alone)
        for key, value in written.items():
            expect_same(value, half[f"{name}{key}"])
        assert all(f"weights.{index} exp_avg_scale" in alone for index in range(3))
        assert alone["weights.0 exp_avg"].dtype.itemsize == 1
        assert alone["weights.3 exp_avg"].dtype is torch.float32
        assert not torch.equal(alone["weights.0"], Constants().weights[0])


class Pair(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def _tensor_parallel(inner: int, tensor: int):
    mesh = init_device_mesh("cpu", (2 // tensor, tensor), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = fully_shard(parallelize_module(Pair(inner), mesh["tensor"], plan), mesh=mesh["data"])
    return net, forge.attach(net, lr=1e-2, eps=1e-3, state_format="int8")


def _columns() -> None:
    """Tensor-parallel ranks have columns of the second weight, in whole blocks or not."""
    found = []
    for tensor in (1, 2):
        net, optimizer = _tensor_parallel(256, tensor)
        for step in range(3):
            net(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[net.down.weight]["exp_avg_scale"].shape == (6, 4)
        found.append(contents(net, optimizer))
    for name, value in found[0].items():
        # Another order of a sum may round to the next code, 1/64 of its block's largest away.
        scale = value.abs().max().item()
        atol = scale / 64 if name.endswith("exp_avg_scale") else 1e-4 if name in dict(net.named_parameters()) else None
        if atol is not None:
            torch.testing.assert_close(found[1][name], value, rtol=0, atol=atol)
    with pytest.raises(
        NotImplementedError, match=r"^down.weight: state_format='int8' of a weight \[6, 130\] placed as"
    ):
        _tensor_parallel(130, 2)


def _whole_checkpoints() -> None:
    """Of one process, gathered from the ranks, and of another format."""
    single, alone = made(OPTIONS["int8"], sharded=False)
    take(single, alone, range(2))
    saved, values = copy.deepcopy(alone.state_dict()), copy.deepcopy(single.state_dict())
    take(single, alone, range(2, 4))

    net, optimizer = made(OPTIONS["int8"], sharded=True)
    optimizer.load_state_dict(saved)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(net, values, options=options)
    gathered = get_state_dict(net, optimizer, options=options)
    other, resumed = made(OPTIONS["int8"], sharded=True)
    set_state_dict(other, resumed, model_state_dict=gathered[0], optim_state_dict=gathered[1], options=options)
    for model, stepper in ((net, optimizer), (other, resumed)):
        take(model, stepper, range(2, 4))
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs)

    _, plain = made({"recipe": "bf16-state"}, sharded=True)
    with pytest.raises(ValueError, match=r"exp_avg is torch.int8 in the checkpoint, torch.bfloat16 in the optimizer"):
        plain.load_state_dict(saved)
    with pytest.warns(UserWarning, match="from int8 to bf16"):
        plain.load_state_dict(saved, convert=True)
    _, again = made(OPTIONS["int8"], sharded=True)
    with pytest.warns(UserWarning, match="from bfloat16 to int8"):
        again.load_state_dict(plain.state_dict(), convert=True)
    for key, p in enumerate(again.names):
        for name, value in again.state[p].items():
            # What bf16 rounded is the same code, or the next; a scale is the largest of its block.
            whole, before = value.full_tensor() if value.dim() else value, saved["state"][key][name].float()
            atol = 2.0**-8 * before.abs().max().item() if name.endswith("_scale") or p.dim() < 2 else 1.0
            torch.testing.assert_close(whole.float(), before, rtol=0, atol=atol)


def _refused() -> None:
    with pytest.raises(NotImplementedError, match=r"^weights.0: weight_store='fp8' of weights that fully_shard has"):
        made({"recipe": "fp8-weight"}, sharded=True)


def _others() -> None:
    _refused()
    _columns()
    _whole_checkpoints()


def test_other_placements_and_whole_checkpoints():
    run(2, _others)
