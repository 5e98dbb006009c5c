"""Newton-Schulz as CUDA graphs on a GPU: the bits of what they replace, on any stream, and what they keep."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import forge_megatron as forge
from forge_megatron.kernels import Slot, replays, wgrad_step
from forge_megatron.rules import get

STEPS = 4
ADAMW = {"lr": 1e-3}


class Model(nn.Module):
    """Two equal blocks of matrices that are square, wide and tall, with norms and biases between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 768, bias=False), nn.Linear(768, 256)]
            )
            for _ in range(3)
        )

    def forward(self, x):
        for norm, square, tall, wide in self.blocks:
            x = x + wide(torch.tanh(tall(square(norm(x)))))
        return x


def stepping(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def trained(model, rule="muon", stream=None, captured=False, **options):
    """Every weight and state after some steps, and the optimizer."""
    optimizer = forge.attach(model, rule, lr=1e-2, adamw=ADAMW, **options)
    step = stepping(model, optimizer)
    step = optimizer.capture(step) if captured else step
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for seed in range(STEPS if not captured else STEPS + 2):
            step(torch.randn(512, 256, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16))
    torch.cuda.synchronize()
    tensors = [p.detach().clone() for p in model.parameters()]
    return tensors + [t.clone() for p in model.parameters() for t in optimizer.state[p].values()], optimizer


def plain(monkeypatch, model, *arguments, **options):
    with monkeypatch.context() as patched:
        patched.setattr(replays, "most_elements", 0)
        return trained(model, *arguments, **options)[0]


def expect_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


@pytest.fixture(autouse=True)
def forgotten():
    """What another test has left."""
    gc.collect()
    replays._known.clear()


@pytest.fixture
def model():
    return Model().to("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("muon", {}),
        ("muon", {"row_split": 64}),
        ("muon", {"recipe": "fp32-master", "clip_grad_norm": 0.1}),
        ("scion", {}),
    ],
    ids=str,
)
def test_replays_have_the_bits_of_plain_operations(rule, options, model, monkeypatch):
    twin = copy.deepcopy(model)
    ours, optimizer = trained(model, rule, **options)
    (known,) = replays._known.values()
    assert all(replay.__name__ == "replay" for replay in known._graphs.values())
    assert len(known._graphs) == 3
    held = optimizer.coverage.replay_bytes
    assert known._memory.nbytes < held < 4 * known._memory.nbytes + (96 << 20)
    expect_same_bits(ours, plain(monkeypatch, twin, rule, **options))


def test_streams_have_graphs_of_their_own(model, monkeypatch):
    twins = [copy.deepcopy(model) for _ in range(2)]
    ours, first = trained(model)
    beside, second = trained(twins[0], stream=torch.cuda.Stream())
    assert len(replays._known) == 2
    expect_same_bits(ours, beside)
    expect_same_bits(ours, plain(monkeypatch, twins[1]))
    assert first.coverage.replay_bytes > 0
    assert second.coverage.replay_bytes > 0


def test_a_captured_step_has_none_and_the_same_bits(model):
    twin = copy.deepcopy(model)
    captured, optimizer = trained(model, captured=True)
    assert optimizer.coverage.replay_bytes == 0
    eager = forge.attach(twin, "muon", lr=1e-2, adamw=ADAMW)
    step = stepping(twin, eager)
    for seed in range(STEPS + 2):
        step(torch.randn(512, 256, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16))
    assert eager.coverage.replay_bytes > 0
    expect_same_bits(captured[: len(list(twin.parameters()))], list(twin.parameters()))


def test_their_memory_goes_with_the_last_optimizer(model):
    _, optimizer = trained(model)
    assert optimizer.coverage.replay_bytes > 0
    optimizer.detach()
    del optimizer
    gc.collect()
    assert not replays._known


def test_a_stage_that_waits_for_the_device_runs_as_it_is_and_training_goes_on(monkeypatch):
    def waits(u):
        return u.mul_(2.0 if u[0, 0].item() > 0 else 3.0)

    rule = get("muon").variant(get("muon").resolve({"lr": 0.1}))
    rule = replace(rule, stages=replace(rule.stages, transform=waits))
    shape = (256, 256)
    weights = [torch.ones(shape, device="cuda") for _ in range(2)]
    slot, twin = (Slot(rule, w, (torch.zeros_like(w),), torch.full((4,), 0.5, device="cuda")) for w in weights)
    factors = [tuple(torch.randn(64, n, device="cuda", dtype=torch.bfloat16) for n in shape)]
    wgrad_step(slot, factors)
    with pytest.warns(UserWarning, match="could not be captured"):
        wgrad_step(slot, factors)
    wgrad_step(slot, factors)
    # Nothing is drawn for the graph that failed.
    torch.rand(4, device="cuda")
    monkeypatch.setattr(replays, "most_elements", 0)
    for _ in range(3):
        wgrad_step(twin, factors)
    assert torch.equal(slot.weight, twin.weight)
