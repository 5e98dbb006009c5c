"""Times the fused step of single linears against cuBLAS and an elementwise step, on one GPU.

``python recipes/bench/kernels.py --out FILE.json`` from the repository's root. Each cell, a shape and
a number of tokens, first checks every arm against fp64 on sampled rows, then times it: all launches
of one round, over weights that together exceed the L2, are one CUDA graph. ``floor`` is the larger of
the GEMM alone (cuBLAS, bf16 out) and of reading and writing W, m and v alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forge_megatron import rules  # noqa: E402
from forge_megatron.kernels import Slot, choose, cublas_wgrad, hopper_wgrad, reserved, triton_wgrad, wgrad_step  # noqa: E402
from forge_megatron.kernels.hopper_config import CONFIGS, Config, choose_config  # noqa: E402
from forge_megatron.kernels.triton_language import compiled_update  # noqa: E402
from forge_megatron.kernels.tuning_files import source_hash  # noqa: E402

#: [O, I] of the linears of each model; shapes that recur are timed once.
MODELS = {
    "Llama-3.1-8B": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)],
    "Qwen3-8B": [(4096, 4096), (1024, 4096), (12288, 4096), (4096, 12288)],
    "Qwen3-4B": [(4096, 2560), (1024, 2560), (2560, 4096), (9728, 2560), (2560, 9728)],
    "Qwen3-0.6B": [(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024, 3072)],
}
TOKENS = (512, 2048, 8192)

#: What is timed besides the table's configurations.
CANDIDATES: dict[str, Config] = {
    **CONFIGS,
    "pp64x256": Config(True, 1, 256, 32, stages=6, slots=4, group=8, chunks=4),
    "co128": Config(False, 1, 128, 64, stages=4, slots=4, group=8),
}
GROUPS = (4, 8)
SAMPLED_ROWS = 128
HYPERPARAMETERS = {"lr": 1e-2, "weight_decay": 0.1}
STEP = 10


@triton.jit
def state_kernel(weight, first, second, scalars, size, UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    """Read and write W, m and v, by the rule, from a gradient that is made of the weight."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    h = ()
    for index in tl.static_range(8):
        h = h + (tl.load(scalars + index),)  # noqa: RUF005 - Triton has no unpacking
    w = tl.load(weight + offset, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + offset, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + offset, mask=inside, other=0.0).to(tl.float32)
    w, new = UPDATE(w * 1e-3, w, (m, v), h)
    tl.store(weight + offset, w.to(tl.bfloat16), mask=inside)
    tl.store(first + offset, new[0].to(tl.bfloat16), mask=inside)
    tl.store(second + offset, new[1].to(tl.bfloat16), mask=inside)


def timed(launches, target_ms: float = 5.0, samples: int = 7, tables: int = 0) -> float:
    """Median µs of one launch: all ``launches`` in one CUDA graph, repeated, between two events.

    Args:
        tables: bytes of the tables that the launches read, which are filled once they are captured.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph = torch.cuda.CUDAGraph()
    # The graph reads the memory: it lives until the last replay.
    with reserved(tables, torch.device("cuda")) as _memory, torch.cuda.graph(graph):
        for launch in launches:
            launch()

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    replay(1)
    repeat = max(1, min(50, round(target_ms / max(replay(1), 1e-3))))
    measured = sorted(replay(repeat) for _ in range(samples))
    return measured[samples // 2] * 1000 / (repeat * len(launches))


class Cell:
    """Weights, states and operands of one shape: enough of them that a round is beyond the L2."""

    def __init__(self, rows: int, columns: int, tokens: int):
        self.shape, self.tokens = (rows, columns), tokens
        self.rule = rules.get("adamw")
        group = self.rule.resolve(HYPERPARAMETERS)
        scalars = torch.tensor(self.rule.scalars(group, STEP), device="cuda")
        count = max(2, min(12, -(-(300 << 20) // (6 * rows * columns))))
        self.members = []
        for _ in range(count):
            weight = 0.02 * torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            first = 1e-3 * torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            # Away from 0, where a coordinate without gradient would divide by eps alone and be all of the error.
            second = 1e-5 * (0.5 + torch.rand(rows, columns, device="cuda", dtype=torch.bfloat16))
            dy = 1e-3 * torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            self.members.append((Slot(self.rule, weight, (first, second), scalars), [(dy, x)]))
        # Timing steps the members thousands of times, until bf16 states rest where rounding is no longer random.
        self.fresh = [tensor.clone() for _, tensor in self.members[0][0].tensors()]

    def time(self, step) -> float:
        return timed([lambda m=member: step(*m) for member in self.members])

    def check(self, step) -> float:
        """Return the relative error of the weight's change against fp64 on sampled rows, in the norm."""
        slot, segments = self.members[0]
        before = self.fresh
        for (_, tensor), start in zip(slot.tensors(), before, strict=True):
            tensor.copy_(start)
        step(slot, segments)
        torch.cuda.synchronize()
        sample = torch.randperm(self.shape[0], device="cuda")[:SAMPLED_ROWS]
        dy, x = segments[0]
        g = dy[:, sample].double().t() @ x.double()
        w, m, v = (tensor[sample].double() for tensor in before)
        lr, decay = HYPERPARAMETERS["lr"], HYPERPARAMETERS["weight_decay"]
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w = w * (1 - lr * decay) - lr / (1 - 0.9**STEP) * m / ((v / (1 - 0.999**STEP)).sqrt() + 1e-8)
        worst = 0.0
        for want, (_, tensor) in zip((w, m, v), slot.tensors(), strict=True):
            got = tensor[sample].double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
        return worst

    def state_traffic(self) -> float:
        """The best of four launch shapes."""
        update = compiled_update(self.rule)
        size = self.shape[0] * self.shape[1]

        def step(block, warps):
            def launch(slot, segments):
                state_kernel[(triton.cdiv(size, block),)](
                    slot.weight, *slot.states, slot.scalars, size, UPDATE=update, BLOCK=block, num_warps=warps
                )

            return launch

        return min(self.time(step(block, warps)) for block, warps in ((1024, 4), (2048, 8), (4096, 8)))

    def host_us(self, step) -> float:
        """Host time of one call, with the GPU idle at first."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            step(*self.members[0])
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return elapsed * 1e5


#: Rounding to bf16 alone, in the norm, is 1.7e-3.
MAX_ERROR = 2.5e-3


def arms():
    """``(name, step)``: what is checked and timed in a cell."""
    yield "auto", lambda slot, segments: wgrad_step(slot, segments)
    yield "cublas+step", lambda slot, segments: cublas_wgrad.wgrad_step(slot, segments, None)
    yield "portable", lambda slot, segments: triton_wgrad.wgrad_step(slot, segments, None, None)
    for name in CANDIDATES:
        for group in GROUPS:
            config = replace(CANDIDATES[name], group=group)
            yield (
                f"{name}/g{group}",
                lambda slot, segments, c=config: hopper_wgrad.wgrad_step(slot, segments, None, None, c),
            )


def measure(rows: int, columns: int, tokens: int) -> dict:
    cell = Cell(rows, columns, tokens)
    outs = [torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    result = {
        "shape": [rows, columns],
        "tokens": tokens,
        "chosen": choose((rows, columns), tokens, "cuda"),
        "configuration": choose_config(rows, columns, tokens),
        "cublas": cell.time(lambda slot, segments: torch.mm(segments[0][0].t(), segments[0][1], out=outs[0])),
        "3r3w": cell.state_traffic(),
        "us": {},
        "error": {},
        "refused": {},
    }
    result["floor"] = max(result["cublas"], result["3r3w"])
    for name, step in arms():
        error = cell.check(step)
        if error <= MAX_ERROR:
            result["error"][name] = error
            result["us"][name] = cell.time(step)
        else:
            result["refused"][name] = error
    result["host_us"] = {
        "auto": cell.host_us(lambda slot, segments: wgrad_step(slot, segments)),
        "portable": cell.host_us(lambda slot, segments: triton_wgrad.wgrad_step(slot, segments, None, None)),
    }
    best = result["us"].get("auto", math.nan)  # nan: refused, so no speed of it is reported
    result["tflops"] = 2e-6 * tokens * rows * columns / best
    result["gbytes_per_s"] = 12e-3 * rows * columns / best
    return result


def resources() -> dict[str, dict]:
    """Registers, spills and shared memory of each candidate."""
    cell = Cell(256, 512, 64)
    slot, segments = cell.members[0]
    used = {}
    for name, config in CANDIDATES.items():
        positional, keywords = hopper_wgrad.arguments(
            slot, segments, None, None, None, hopper_wgrad.fitted_to(config, slot)
        )
        kernel = hopper_wgrad.hopper_wgrad_step_kernel.warmup(*positional, grid=(1,), **keywords)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        kernel._init_handles()
        used[name] = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    return used


def gpu_state() -> str:
    query = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(cells: list[dict]) -> dict[str, dict]:
    """Geometric means by tokens: of auto, and of the best arm of each cell, to the floor and to cuBLAS and a step."""
    table = {}
    for tokens in sorted({cell["tokens"] for cell in cells}):
        mine = [cell for cell in cells if cell["tokens"] == tokens and "auto" in cell["us"]]
        best = [
            min(((us, name) for name, us in cell["us"].items() if name != "auto"), default=(math.nan, "none"))
            for cell in mine
        ]
        table[str(tokens)] = {
            "auto/floor": geomean([cell["us"]["auto"] / cell["floor"] for cell in mine]),
            "auto/cublas+step": geomean(
                [c["us"]["auto"] / c["us"]["cublas+step"] for c in mine if "cublas+step" in c["us"]]
            ),
            "best/floor": geomean([us / cell["floor"] for (us, _), cell in zip(best, mine, strict=True)]),
            "by arm": {
                name: geomean([cell["us"][name] / cell["floor"] for cell in mine])
                for name in (mine[0]["us"] if mine else ())
                if all(name in cell["us"] for cell in mine)
            },
        }
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--budget", type=float, default=230.0, help="seconds; cells beyond are left out, and counted")
    options = parser.parse_args()
    began = time.time()
    log = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "source": source_hash()[:16],
        "gpu_before": gpu_state(),
        "resources": resources(),
        "models": MODELS,
        "cells": [],
    }
    print(f"{log['gpu']}, source {log['source']}, {log['gpu_before']}; {time.time() - began:.0f}s to compile")
    shapes = list(dict.fromkeys(shape for model in MODELS.values() for shape in model))
    todo = [(*shape, tokens) for shape in shapes for tokens in map(int, options.tokens.split(","))]
    for done, (rows, columns, tokens) in enumerate(todo):
        if time.time() - began > options.budget:
            log["left_out"] = todo[done:]
            print(f"{len(todo) - done} cells left out: the budget is spent")
            break
        cell = measure(rows, columns, tokens)
        log["cells"].append(cell)
        ranked = sorted((us, name) for name, us in cell["us"].items())
        print(
            f"{rows:>6}x{columns:<6}T={tokens:<5} cublas {cell['cublas']:7.1f} 3r3w {cell['3r3w']:6.1f} | "
            + " ".join(f"{name} {us:.1f}" for us, name in ranked[:4])
            + " | "
            + " ".join(f"{k} {cell['us'].get(k, math.nan):.1f}" for k in ("auto", "cublas+step", "portable"))
            + f" | auto/floor {cell['us'].get('auto', math.nan) / cell['floor']:.3f}"
            + f", host {cell['host_us']['auto']:.0f}"
            + (f" REFUSED {cell['refused']}" if cell["refused"] else ""),
            flush=True,
        )
        torch.cuda.empty_cache()
        # After every cell: what was measured outlives a hang or a time limit.
        options.out.write_text(json.dumps(log, indent=1))
    log["gpu_after"] = gpu_state()
    log["summary"] = summary(log["cells"])
    log["seconds"] = time.time() - began
    options.out.write_text(json.dumps(log, indent=1))
    print(json.dumps(log["summary"], indent=1))
    return int(any(cell["refused"] for cell in log["cells"]))


if __name__ == "__main__":
    sys.exit(main())
