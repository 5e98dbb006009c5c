"""T0: a weight through the buckets of a group of one rank, against the same kernels run directly.

Catches whatever the pipeline does to a gradient or to a step between the two kernels: a row that is cut twice or not at
all, padding, a factor on the gradient, a step that is made twice.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

ROWS, COLUMNS, TOKENS, STEPS = 37, 24, 10, 3


def measure(case: Case) -> list[Reading]:
    import torch
    import torch.distributed as dist
    from torch import nn

    import forge_megatron as forge
    from forge_megatron import kernels, rules
    from gates.pair import ADAMW, DTYPES, device_of

    dtype, device = DTYPES[case.dtype], device_of(case)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()]
    readings = []
    for sharding in ("none", "states"):
        for nbytes in (COLUMNS * 5 * dtype.itemsize, 1 << 20):
            torch.manual_seed(3)
            linear = nn.Linear(COLUMNS, ROWS, bias=False, device=device, dtype=dtype)
            weight = linear.weight.detach().clone()
            options = {"process_group": alone, "sharding": sharding, "buckets": forge.Buckets(nbytes=nbytes)}
            optimizer = forge.attach(linear, "adamw", recipe="fp32-state", **options, **ADAMW)
            rule = rules.get("adamw")
            group = {**rule.defaults, **ADAMW}
            states = tuple(torch.zeros(ROWS, COLUMNS, device=device) for _ in rule.states)
            for step in range(1, STEPS + 1):
                x = torch.randn(TOKENS, COLUMNS, device=device, dtype=dtype)
                dy = torch.randn(TOKENS, ROWS, device=device, dtype=dtype)
                linear(x).backward(dy)
                optimizer.step()
                optimizer.zero_grad()
                scalars = torch.tensor(rule.scalars(group, step), dtype=torch.float32, device=device)
                gradient = torch.empty(ROWS, COLUMNS, device=device, dtype=dtype)
                for rows in torch.arange(ROWS, device="cpu").split(5 if nbytes < 1 << 20 else ROWS):
                    part = slice(int(rows[0]), int(rows[-1]) + 1)
                    kernels.wgrad([kernels.of_rows((dy, x), part)], gradient[part])
                kernels.step([kernels.Slot(rule, weight, states, scalars)], [gradient])
            pairs = [(linear.weight, weight), *zip(_states(optimizer, linear.weight), states, strict=True)]
            gap = max((a.detach().double() - b.double()).abs().max().item() for a, b in pairs)
            size = "cut by rows" if nbytes < 1 << 20 else "whole"
            readings.append(Reading(f"max |ΔW| and |Δstate|, sharding={sharding}, {size}", gap, 0.0))
    return readings


def _states(optimizer, weight):
    return [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]


GATE = Gate(
    id="T0",
    compares="a weight through the buckets of a group of one rank, against the same kernels run directly, bit for bit",
    axis="dp",
    least=2,
    shardings=("none", "states"),
    sp=(False,),
    dtypes=("fp32", "bf16"),
    measure=measure,
)
