"""A captured step has the bits of an eager one, whatever changes from step to step."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import live

import forge_megatron as forge

STEPS = 10


class Model(live.LanguageModel):
    """With a norm and a bias too, which are stepped from ``.grad`` by the multi-tensor kernel."""

    def __init__(self, tied, dropout=0.0):
        super().__init__(tied)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(live.WIDTH), nn.Linear(live.WIDTH, live.WIDTH), nn.Dropout(dropout))
            for _ in range(2)
        )


def stepping(model, optimizer):
    def step(ids):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def tensors(model, optimizer):
    """By name, every weight and state."""
    found = dict(model.named_parameters())
    for name, p in list(found.items()):
        found.update({f"{name} {key}": value for key, value in optimizer.state[p].items()})
    return found


def train(model, options, *, captured):
    optimizer = forge.attach(model, lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = stepping(model, optimizer)
    step = optimizer.capture(step) if captured else step
    trace = []
    for index in range(STEPS):
        loss = step(live.ids(index, "cuda"))
        trace.append({"loss": loss.detach().clone(), "grad_norm": optimizer.grad_norm.clone()})
        trace[-1].update({name: tensor.detach().clone() for name, tensor in tensors(model, optimizer).items()})
        schedule.step()
    return trace


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"recipe": "sr-store"}),
        (torch.bfloat16, {"recipe": "fp32-master", "clip_grad_norm": 0.1}),
        (torch.bfloat16, {"skip": "atomic"}),
        (torch.bfloat16, {"rule": "nadam", "skip": "atomic"}),
        (torch.bfloat16, {"backend": "triton"}),
        # Steps 1, 5 and 9 refresh projections, and run as they are.
        (torch.bfloat16, {"rule": "galore", "rank": 8, "update_proj_gap": 4}),
        (torch.bfloat16, {"rule": "apollo", "rank": 8, "update_proj_gap": 4, "clip_grad_norm": 0.1}),
        (torch.bfloat16, {"rule": "apollo_mini", "update_proj_gap": 4, "skip": "atomic"}),
    ],
    ids=str,
)
def test_ten_steps_have_the_bits_of_eager_ones(dtype, options, tied):  # field log rows 77 and 79
    model = Model(tied).to("cuda", dtype)
    traces = [train(copy.deepcopy(model), options, captured=captured) for captured in (False, True)]
    for index, (eager, captured) in enumerate(zip(*traces, strict=True)):
        for name, value in eager.items():
            gap = (captured[name].double() - value.double()).abs().max().item()
            differing = (captured[name] != value).sum().item()
            what = "warm-up" if index < 3 else "capture" if index == 3 else "replay"
            assert torch.equal(captured[name], value), (
                f"step {index + 1} ({what}): {name} differs from eager in {differing} of {value.numel()} by {gap}"
            )


def test_by_hand():  # field log row 79
    """SGD with a gradient of 1 at three learning rates, each replayed."""
    weight = nn.Linear(1, 1, bias=False, device="cuda")
    optimizer = forge.attach(weight, "sgd", lr=0.0)

    def step(x):
        weight(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = optimizer.capture(step, warmup=1)
    before = weight.weight.item()
    for lr in (0.0, 0.0, 1e-2, 5e-3, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        captured(torch.ones(1, 1, device="cuda"))
    assert weight.weight.item() - before == pytest.approx(-0.015, abs=1e-7)


def test_dropout_draws_another_mask_at_each_replay():
    model = Model(False, dropout=0.5).cuda()
    optimizer = forge.attach(model, "sgd", lr=0.0)
    step = optimizer.capture(stepping(model, optimizer))
    losses = [step(live.ids(0, "cuda")).item() for _ in range(8)]
    assert len(set(losses)) == len(losses), losses


def test_a_step_that_reads_a_value_on_the_host_is_refused_and_training_goes_on():
    model = Model(False).cuda()
    optimizer = forge.attach(model, lr=1e-3)
    eager = stepping(model, optimizer)
    generator = torch.Generator("cuda")

    def step(ids, reads):
        loss = eager(ids) + 0.0 * torch.rand((), device="cuda", generator=generator)
        if reads:
            loss.item()
        return loss

    captured = optimizer.capture(step, warmup=1, generators=[generator])
    for reads in (True, False):
        captured(live.ids(0, "cuda"), reads)
    before = {name: tensor.detach().clone() for name, tensor in tensors(model, optimizer).items()}
    drawn = torch.cuda.get_rng_state(), generator.get_state()
    with pytest.raises(RuntimeError, match="could not be captured as a CUDA graph"):
        captured(live.ids(1, "cuda"), True)
    for name, tensor in tensors(model, optimizer).items():
        assert torch.equal(tensor, before[name]), f"{name} changed by a capture that failed"
    assert torch.equal(torch.cuda.get_rng_state(), drawn[0])
    assert torch.equal(generator.get_state(), drawn[1])
    # Nothing is drawn for a graph, or allocated for its pool, any more; and another step can be captured.
    torch.rand(4, device="cuda") + torch.rand(4, device="cuda", generator=generator)
    eager(live.ids(1, "cuda"))
    for index in range(3):
        captured(live.ids(index, "cuda"), False)
    torch.cuda.synchronize()
    assert all(state["step"] == 6 for state in optimizer.state.values())


def test_replays_allocate_nothing():
    model = Model(True).to("cuda", torch.bfloat16)
    optimizer = forge.attach(model, lr=1e-3)
    step = optimizer.capture(stepping(model, optimizer))
    held = []
    for index in range(12):
        step(live.ids(index, "cuda"))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[6:])) == 1, f"bytes held after each step: {held}"
