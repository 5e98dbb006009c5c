"""The check before anything is timed: a small fp32 model trained by the arm and by its judge."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launch.bench import arms
from launch.bench.arm import Arm, Settings
from launch.bench.loop import Loop, prepare, stepper
from launch.bench.shapes import Shape

STEPS = 20
#: AdamW's rate; a weight decay that no arm could leave out unseen.
SETTINGS = Settings(lr=1e-3, weight_decay=1.0)
BATCH, SEQUENCE = 2, 64


def parity(name: str, kind: str, device: str) -> dict:
    """Trains the small model ``STEPS`` steps with both; how far their weights are apart.

    Over ranks the judge trains in each of them, on the whole batch.

    Returns:
        ``distance`` (None for a judge), ``bound`` (None: another rule or format than the judge's), ``passed``,
        ``judge`` and ``kind``.
    """
    arm = arms.get(name)
    answer = {"kind": kind, "judge": arm.judge, "distance": None, "bound": arm.bound, "passed": True}
    if arm.judge is None:
        return answer
    judge = arms.get(arm.judge)
    shape = Shape(kind=kind, dtype="fp32")
    world = dist.get_world_size() if arm.over_ranks else 1
    ours = prepare(shape, arm, device, BATCH, SEQUENCE, SETTINGS)
    theirs = prepare(shape, judge, device, BATCH * world, SEQUENCE, SETTINGS)
    before = _weights(theirs)
    for loop in (ours, theirs):
        run = stepper(loop)
        for _ in range(STEPS):
            run()
    pairs = zip(_weights(ours), _weights(theirs), before, strict=True)
    apart = moved = 0.0
    for got, want, start in pairs:
        apart += (got - want).square().sum().item()
        moved += (want - start).square().sum().item()
    distance = (apart / moved) ** 0.5
    return answer | {"distance": distance, "passed": arm.bound is None or distance <= arm.bound}


def _weights(loop: Loop) -> list[Tensor]:
    """Whole weights in fp64; every rank must ask for those that are sharded."""
    found = [p.detach() for p in loop.model.parameters()]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).double().clone() for p in found]


def refusal(arm: Arm, checked: dict) -> str | None:
    """Why nothing of the arm is reported, or None."""
    if checked["passed"]:
        return None
    return f"parity {checked['distance']:.2e} from {arm.judge} is above {arm.bound:.0e}: nothing is reported"
