"""Times what the host does for one owned linear in a training step: microseconds a phase, torch's operators, profiles.

``python recipes/bench/host.py`` from the repository's root. The linears are so small that the host alone decides how
long a step takes. On a CPU the update's launch is left out, because there the reference would run in its place.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import forge_megatron as forge  # noqa: E402
from forge_megatron.kernels import fused  # noqa: E402

TOKENS = 8
PHASES = ("forward", "backward", "step", "zero_grad")


class Dropped:
    """Forward and backward alone: gradients are dropped."""

    def __init__(self, params):
        self.params = list(params)

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


ARMS: dict[str, Callable] = {
    "forward and backward": lambda model: Dropped(model.parameters()),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "forge": lambda model: forge.attach(model, "adamw", lr=1e-3),
    "forge-waiting": lambda model: forge.attach(model, "adamw", lr=1e-3, waiting=True),
}


def stack(count: int, width: int, device: str) -> nn.Module:
    """``count`` bias-free bf16 linears of ``[width, width]``, one after another."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(device, torch.bfloat16)


def phases(model: nn.Module, optimizer, x: torch.Tensor) -> list[float]:
    """Seconds of the host in each phase of one step."""
    marks = [time.perf_counter()]
    y = model(x)
    marks.append(time.perf_counter())
    y.backward(torch.ones_like(y))
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(marks)]


def measure(attach: Callable, count: int, width: int, device: str, steps: int, listed: int) -> dict:
    model = stack(count, width, device)
    optimizer = attach(model)
    x = torch.randn(TOKENS, width, device=device, dtype=torch.bfloat16)

    def run() -> list[float]:
        taken = phases(model, optimizer, x)
        if device == "cuda":
            torch.cuda.synchronize()
        return taken

    for _ in range(5):
        run()
    samples = [run() for _ in range(steps)]
    microseconds = {
        phase: round(1e6 * statistics.median(column) / count, 2)
        for phase, column in zip(PHASES, zip(*samples, strict=True), strict=True)
    }
    answer = {"us": microseconds, "total_us": round(sum(microseconds.values()), 2)}
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as recorded:
        run()
    names = Counter(event.name for event in recorded.events())
    answer["operators"] = {name: round(n / count, 2) for name, n in names.most_common() if n >= count / 2}
    if listed:
        # Backward in the profiled thread.
        with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as profiled:
            for _ in range(5):
                run()
        pstats.Stats(profiled).sort_stats("tottime").print_stats(listed)
    return answer


def left_out(*operands) -> Callable[..., None]:
    """In place of :func:`fused.launch`: launches nothing. A ``Mock`` would keep every operand, and so every graph."""
    return lambda *operands: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--linears", type=int, default=200)
    parser.add_argument("--width", type=int, default=64, help="the GPU's kernels differ by size")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N most expensive functions")
    args = parser.parse_args()
    for name in args.arms:
        with mock.patch.object(fused, "launch", left_out) if args.device == "cpu" else nullcontext():
            answer = measure(ARMS[name], args.linears, args.width, args.device, args.steps, args.profile)
        print(json.dumps({"arm": name, **answer}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
