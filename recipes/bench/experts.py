"""Times the fused step of experts in one tensor, on one GPU: the Hopper kernel, the portable one, and torch's products.

``python recipes/bench/experts.py --out FILE.jsonl`` from the repository's root: a line a cell, which is a shape, a
number of experts and of tokens, spread unevenly. Every arm is first checked against fp64 on rows of the expert with the
most tokens. ``grouped_mm`` is torch's product alone, whose gradient of every expert is in memory; ``+ step`` steps from
it, in one launch. ``loop`` multiplies one expert after another into one fp32 scratch and steps it; the host knows where
their tokens are. ``fused adamw`` is torch's step alone; ``accumulate`` adds to an fp32 gradient, ``norm`` measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from kernels import HYPERPARAMETERS, MAX_ERROR, SAMPLED_ROWS, STEP, gpu_state, timed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forge_megatron import rules
from forge_megatron.kernels import (
    GroupedRows,
    Slot,
    cublas_wgrad,
    hopper_wgrad,
    step,
    table_bytes,
    triton_wgrad,
    wgrad_accumulate,
    wgrad_norm_sq,
)
from forge_megatron.kernels.blocks import at
from forge_megatron.kernels.hopper_config import CONFIGS, choose_config
from forge_megatron.kernels.tuning_files import source_hash

#: experts, [O, I] of one: gate and up, and down, of Qwen3-30B-A3B and of Mixtral 8x7B.
SHAPES = [
    (64, 1536, 2048),
    (64, 2048, 768),
    (16, 1536, 2048),
    (16, 2048, 768),
    (8, 28672, 4096),
    (8, 4096, 14336),
    (8, 1536, 2048),
    (8, 2048, 768),
]
TOKENS = (4096, 8192)

#: Bytes of weights and states that one round walks over: far more than any L2.
BEYOND_L2 = 300 << 20


class Cell:
    """Experts, their states, and tokens of which a few experts have the most and some have none."""

    def __init__(self, experts: int, rows: int, columns: int, tokens: int):
        generator = torch.Generator().manual_seed(experts)
        share = torch.rand(experts, generator=generator) ** 2
        share[1::8] = 0.0
        routes = torch.multinomial(share, tokens, replacement=True, generator=generator)
        self.counts = torch.bincount(routes, minlength=experts).tolist()
        self.bounds = F.pad(torch.cumsum(torch.tensor(self.counts), 0), (1, 0)).int().cuda()
        self.ends = self.bounds[1:].contiguous()
        self.rule = rules.get("adamw")
        group = self.rule.resolve(HYPERPARAMETERS)
        scalars = torch.tensor(self.rule.scalars(group, STEP), device="cuda")
        shape = (experts, rows, columns)
        self.members = []
        for _ in range(max(1, min(4, -(-BEYOND_L2 // (6 * experts * rows * columns))))):
            weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
            first = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(1e-3)
            second = torch.rand(shape, device="cuda", dtype=torch.bfloat16).add_(0.5).mul_(1e-5)
            dy = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16).mul_(1e-3)
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            slot = Slot(self.rule, weight, (first, second), scalars)
            self.members.append((slot, [(GroupedRows(dy, self.bounds), x)]))
        self.parts = {}
        self.expert = max(range(experts), key=self.counts.__getitem__)
        self.fresh = [tensor[self.expert].clone() for _, tensor in self.members[0][0].tensors()]

    def own(self, expert: int) -> slice:
        begin = sum(self.counts[:expert])
        return slice(begin, begin + self.counts[expert])

    def loop(self, slot: Slot, segments) -> None:
        """One expert after another, into one scratch; experts without tokens are stepped from zeros."""
        dy, x = segments[0]
        for expert, count in enumerate(self.counts):
            key = slot.weight.data_ptr(), expert
            if key not in self.parts:
                # It keeps its launches.
                self.parts[key] = at(slot, expert)
            part, own = self.parts[key], self.own(expert)
            if count:
                grad = cublas_wgrad.gradient(part.weight.shape, [(dy.rows[own], x[own])])
            else:
                grad = torch.zeros(part.weight.shape, device="cuda")
            cublas_wgrad.dense_step(part, grad, None)

    def product(self, slot: Slot, segments) -> torch.Tensor:
        dy, x = segments[0]
        return F.grouped_mm(dy.rows.t(), x, offs=self.ends)

    def arms(self):
        for name, config in CONFIGS.items():
            yield f"hopper {name}", lambda *member, c=config: hopper_wgrad.wgrad_step(*member, None, None, c)
        yield "portable", lambda *member: triton_wgrad.wgrad_step(*member, None, None)
        yield "grouped_mm + step", lambda *member: step([member[0]], [self.product(*member)])
        yield "loop", self.loop

    def error(self, arm) -> float:
        """The relative error of the largest expert's rows, in the norm, of weight and states."""
        slot, segments = self.members[0]
        for (_, tensor), start in zip(slot.tensors(), self.fresh, strict=True):
            tensor[self.expert].copy_(start)
        arm(slot, segments)
        torch.cuda.synchronize()
        sample = torch.randperm(slot.weight.shape[1], device="cuda")[:SAMPLED_ROWS]
        own, (dy, x) = self.own(self.expert), segments[0]
        g = dy.rows[own][:, sample].double().t() @ x[own].double()
        w, m, v = (tensor[sample].double() for tensor in self.fresh)
        lr, decay = HYPERPARAMETERS["lr"], HYPERPARAMETERS["weight_decay"]
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w = w * (1 - lr * decay) - lr / (1 - 0.9**STEP) * m / ((v / (1 - 0.999**STEP)).sqrt() + 1e-8)
        got = [tensor[self.expert][sample].double() for _, tensor in slot.tensors()]
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, (w, m, v), strict=True))

    def time(self, arm) -> float:
        tables = table_bytes(slot.weight for slot, _ in self.members)
        return timed([lambda m=member: arm(*m) for member in self.members], target_ms=3.0, samples=5, tables=tables)

    def others(self, backend: str) -> dict[str, float]:
        """Adding to an fp32 gradient in memory, and the norm alone."""
        shape = self.members[0][0].weight.shape
        sums = [torch.zeros(shape, device="cuda") for _ in self.members]
        norm = torch.zeros((), device="cuda")
        pairs = [(segments, total) for (_, segments), total in zip(self.members, sums, strict=True)]
        times = {
            "accumulate": [lambda p=pair: wgrad_accumulate(*p, backend=backend) for pair in pairs],
            "norm": [lambda p=pair: wgrad_norm_sq(p[0], norm, shape=shape, backend=backend) for pair in pairs],
        }
        return {
            f"{name} {backend}": round(timed(launches, target_ms=2.0, samples=3), 1) for name, launches in times.items()
        }

    def fused_adamw(self) -> float:
        """torch's own step, of one weight."""
        weight = torch.nn.Parameter(self.members[0][0].weight.clone())
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True, capturable=True, lr=torch.tensor(1e-4, device="cuda"))
        return timed([optimizer.step], target_ms=3.0, samples=5)


def measure(experts: int, rows: int, columns: int, tokens: int) -> dict:
    cell = Cell(experts, rows, columns, tokens)
    result = {
        "experts": experts,
        "shape": [rows, columns],
        "tokens": tokens,
        "most": max(cell.counts),
        "empty": cell.counts.count(0),
        "configuration": choose_config(rows, columns, tokens, experts=experts),
        "us": {},
        "refused": {},
    }
    for name, arm in cell.arms():
        error = cell.error(arm)
        if error <= MAX_ERROR:
            result["us"][name] = round(cell.time(arm), 1)
        else:
            result["refused"][name] = error
    result["us"]["grouped_mm"] = round(cell.time(cell.product), 1)
    result["us"] |= cell.others("hopper") | cell.others("triton")
    result["us"]["fused adamw"] = round(cell.fused_adamw(), 1)
    best = min((us for name, us in result["us"].items() if name.startswith("hopper")), default=float("nan"))
    result["gbytes_per_s"] = round(12e-3 * experts * rows * columns / best)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; cells beyond are left out")
    options = parser.parse_args()
    began = time.time()
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "source": source_hash()[:16],
        "state": gpu_state(),
    }
    lines = [about]
    print(json.dumps(about), flush=True)
    for shape in SHAPES:
        for tokens in TOKENS:
            if time.time() - began > options.budget:
                lines.append({"left_out": [*shape, tokens]})
            else:
                lines.append(measure(*shape, tokens))
                torch.cuda.empty_cache()
            print(json.dumps(lines[-1]), flush=True)
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(any(line.get("refused") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
