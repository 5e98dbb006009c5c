"""The check before anything is timed: a small fp32 model trained by the arm and by its judge."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launch.bench import arms
from launch.bench.arm import Arm, Settings
from launch.bench.layout import Layout, small
from launch.bench.loop import Loop, prepare, stepper
from launch.bench.shapes import Shape

STEPS = 20
#: AdamW's rate; a weight decay that no arm could leave out unseen.
SETTINGS = Settings(lr=1e-3, weight_decay=1.0)
BATCH, SEQUENCE = 2, 64


def parity(name: str, kind: str, device: str, layout: Layout | None = None, liger: bool = False) -> dict:
    """Trains the small model ``STEPS`` steps with both; how far their weights are apart.

    At the end, by the RMS of the distance and of what training changed; of a ``stepwise`` arm after each step, by
    the RMS of all these distances and steps.

    Over ranks the judge trains in each of them, on the whole batch. Through Megatron (``layout``) both train on the
    same degrees, each rank compares what it holds, and the sums are of all ranks. With ``liger`` both have its kernels.

    Returns:
        ``distance`` (None for a judge), ``bound`` (None: another rule or format than the judge's), ``passed``,
        ``judge`` and ``kind``.
    """
    arm = arms.get(name)
    answer = {"kind": kind, "judge": arm.judge, "distance": None, "bound": arm.bound, "passed": True}
    if arm.judge is None:
        return answer
    judge = arms.get(arm.judge)
    shape = Shape(kind=kind, dtype="fp32", liger=liger)
    if layout is None:
        world = dist.get_world_size() if arm.over_ranks else 1
        ours = prepare(shape, arm, device, BATCH, SEQUENCE, SETTINGS)
        theirs = prepare(shape, judge, device, BATCH * world, SEQUENCE, SETTINGS)
    else:
        shape, layout = small(shape, layout)
        ours, theirs = (prepare(shape, one, device, BATCH, SEQUENCE, SETTINGS, layout) for one in (arm, judge))
    runs = [stepper(loop) for loop in (ours, theirs)]
    before = _weights(theirs)
    apart = moved = 0.0
    for step in range(STEPS):
        for run in runs:
            run()
        if not arm.stepwise and step < STEPS - 1:
            continue
        after = _weights(theirs)
        for got, want, start in zip(_weights(ours), after, before, strict=True):
            apart += (got - want).square().sum().item()
            moved += (want - start).square().sum().item()
        if arm.stepwise:
            _give(theirs, ours)
            before = after
    if layout is not None:
        sums = torch.tensor([apart, moved], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        apart, moved = sums.tolist()
    distance = (apart / moved) ** 0.5
    return answer | {"distance": distance, "passed": arm.bound is None or distance <= arm.bound}


@torch.no_grad()
def _give(theirs: Loop, ours: Loop) -> None:
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        p.copy_(q)


def _weights(loop: Loop) -> list[Tensor]:
    """Whole weights in fp64; every rank must ask for those that are sharded."""
    parameters = list(loop.model.parameters())
    with getattr(loop.optimizer, "gathered", nullcontext)(parameters):
        found = [p.detach() for p in parameters]
        return [(p.full_tensor() if isinstance(p, DTensor) else p).double().clone() for p in found]


def refusal(arm: Arm, checked: dict) -> str | None:
    """Why nothing of the arm is reported, or None."""
    if checked["passed"]:
        return None
    return f"parity {checked['distance']:.2e} from {arm.judge} is above {arm.bound:.0e}: nothing is reported"
