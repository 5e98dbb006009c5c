"""One cell: parity first, then the timed steps. ``python -m launch.bench.cell ORDER.json ANSWER.json``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from forge_megatron.vocab import causal_lm_loss
from launch import provenance
from launch.bench import arms
from launch.bench.model import build
from launch.bench.spec import Bench, Cell, Shape

#: RMS of the distance from torch's weights, by the RMS of what training changed, fp32, PARITY_STEPS steps. Adam turns
#: a last bit of a gradient near 0 into a whole step of its coordinate: with sums in another order one in a few
#: thousand coordinates does so, while a wrong hyperparameter, a missing decay or a lost token moves this above 1e-2.
PARITY_BOUND = 5e-3
PARITY_STEPS = 20
PARITY_LR, PARITY_WEIGHT_DECAY = 1e-3, 1.0
WEIGHT_DECAY = 0.01
CALLS_BEFORE_CAPTURE = 3


@dataclass
class Loop:
    """A model, its optimizer and one batch."""

    model: nn.Module
    optimizer: object
    tokens: torch.Tensor
    fused_head: bool = False

    def forward(self) -> torch.Tensor:
        if self.fused_head:
            return causal_lm_loss(self.model, self.tokens, self.tokens)
        return self.model(input_ids=self.tokens, labels=self.tokens).loss

    def step(self) -> torch.Tensor:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def prepare(shape: Shape, arm: arms.Arm, device: str, batch: int, sequence: int, **hyperparameters) -> Loop:
    model = build(shape, device)
    generator = torch.Generator(device=device).manual_seed(1)
    tokens = torch.randint(shape.vocab_size, (batch, sequence), generator=generator, device=device)
    return Loop(model, arm.attach(model, **hyperparameters), tokens, arm.fused_head)


def parity(name: str, kind: str, device: str) -> dict:
    """Trains a small fp32 model with the arm and with ``torch.optim.AdamW``; how far the weights are apart."""
    shape = Shape(kind=kind, dtype="fp32")
    arm = arms.get(name)
    pair = (arm, arms.get("adamw-foreach"))
    loops = [prepare(shape, each, device, 2, 64, lr=PARITY_LR, weight_decay=PARITY_WEIGHT_DECAY) for each in pair]
    start = [p.detach().clone() for p in loops[1].model.parameters()]
    for loop, each in zip(loops, pair, strict=True):
        run = stepper(loop, each)
        for _ in range(PARITY_STEPS):
            run()
    apart = moved = 0.0
    pairs = zip(*(loop.model.parameters() for loop in loops), start, strict=True)
    for ours, theirs, before in pairs:
        apart += (ours.detach().double() - theirs.detach().double()).square().sum().item()
        moved += (theirs.detach().double() - before.double()).square().sum().item()
    distance = (apart / moved) ** 0.5
    return {"distance": distance, "bound": PARITY_BOUND if arm.exact else None, "passed": distance <= PARITY_BOUND}


def stepper(loop: Loop, arm: arms.Arm) -> Callable[[], torch.Tensor]:
    """The whole step as one call: a CUDA graph where the arm is a captured one."""
    if not arm.captured:
        return loop.step
    if hasattr(loop.optimizer, "capture"):
        return loop.optimizer.capture(loop.step)
    return _captured(loop)


def _captured(loop: Loop) -> Callable[[], torch.Tensor]:
    """What torch documents for a whole step: calls on a side stream, then one graph. Every call is one step."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    calls = 0
    captured: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls <= CALLS_BEFORE_CAPTURE:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = loop.step()
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if not captured:
            with torch.cuda.graph(graph):
                captured.append(loop.step())
        graph.replay()
        return captured[0]

    return run


def timed_phases(loop: Loop, steps: int) -> dict[str, list[float]]:
    """ms of forward, backward and optimizer, by events, and of the whole step by the host's clock."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(steps)]
    whole = []
    for first, second, third, last in marks:
        began = time.perf_counter()
        first.record()
        loss = loop.forward()
        second.record()
        loss.backward()
        third.record()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        last.record()
        del loss
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - began) * 1e3)
    phases = {"step": whole}
    for index, phase in enumerate(("forward", "backward", "optimizer")):
        phases[phase] = [mark[index].elapsed_time(mark[index + 1]) for mark in marks]
    return phases


def timed_whole(run: Callable, steps: int) -> dict[str, list[float]]:
    whole = []
    for _ in range(steps):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - began) * 1e3)
    return {"step": whole}


def gradient_bytes(loop: Loop) -> int:
    """Bytes of every ``.grad`` after a backward."""
    loop.forward().backward()
    torch.cuda.synchronize()
    left = sum(p.grad.numel() * p.grad.element_size() for p in loop.model.parameters() if p.grad is not None)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return left


def memory_timeline(loop: Loop) -> list[tuple[str, int]]:
    """Allocated bytes after every decoder layer's forward and backward, and after the optimizer, in one step."""
    marks: list[tuple[str, int]] = []
    layers = next(module for module in loop.model.modules() if isinstance(module, nn.ModuleList))

    def mark(what: str):
        return lambda *_: marks.append((what, torch.cuda.memory_allocated()))

    handles = [layer.register_forward_hook(mark("forward")) for layer in layers]
    handles += [layer.register_full_backward_hook(mark("backward")) for layer in layers]
    loss = loop.forward()
    loss.backward()
    marks.append(("backward end", torch.cuda.memory_allocated()))
    del loss
    loop.optimizer.step()
    marks.append(("optimizer", torch.cuda.memory_allocated()))
    loop.optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return marks


def measure(bench: Bench, cell: Cell) -> dict:
    """The cell's numbers; the peak is the allocator's over warm-up and timed steps."""
    arm = arms.get(cell.arm)
    torch.cuda.reset_peak_memory_stats()
    loop = prepare(bench.model, arm, "cuda", cell.batch, cell.sequence, lr=bench.lr, weight_decay=WEIGHT_DECAY)
    if bench.checkpointing:
        loop.model.gradient_checkpointing_enable()
    run = stepper(loop, arm)
    for _ in range(bench.warm_up):
        run()
    torch.cuda.synchronize()
    phases = timed_whole(run, bench.steps) if arm.captured else timed_phases(loop, bench.steps)
    loss = run().item()
    answer = {
        "ms": {phase: round(statistics.median(values), 3) for phase, values in phases.items()},
        "quartiles_ms": [round(value, 3) for value in statistics.quantiles(phases["step"], n=4)],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": loss,
    }
    if not arm.captured:
        answer["gradient_bytes_after_backward"] = gradient_bytes(loop)
        answer["timeline"] = memory_timeline(loop)
    return answer


def answer_to(message: dict) -> dict:
    bench = Bench(**{**message["bench"], "model": Shape(**message["bench"]["model"])})
    cell = Cell(**message["cell"])
    before = provenance.gpus()
    try:
        checked = parity(cell.arm, bench.model.kind, "cuda")
    except (ImportError, NotImplementedError) as missing:
        return {"left_out": f"{type(missing).__name__}: {missing}"}
    answer = {"parity": checked}
    if arms.get(cell.arm).exact and not checked["passed"]:
        return {**answer, "refused": f"parity {checked['distance']:.2e} above {PARITY_BOUND:.0e}: nothing is reported"}
    torch.cuda.empty_cache()
    try:
        answer |= measure(bench, cell)
    except torch.OutOfMemoryError as error:
        answer["out_of_memory"] = str(error).splitlines()[0]
    return {**answer, "gpus_before": before, "gpus_after": provenance.gpus()}


def main() -> int:
    order, answer = map(Path, sys.argv[1:3])
    answer.write_text(json.dumps(answer_to(json.loads(order.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
