"""One cell: parity first, then the timed steps. ``python -m launch.bench.cell ORDER.json ANSWER.json``.

Over ranks each is such a process, with torchrun's variables; the first writes the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from launch import cpu, distributed, provenance, quiet
from launch.bench import arms
from launch.bench.arm import Settings
from launch.bench.loop import Loop, prepare, stepper
from launch.bench.meter import meter, storage_bytes, tensors_in
from launch.bench.parity import parity, refusal
from launch.bench.shapes import get as get_shape
from launch.bench.spec import Bench, Cell

WEIGHT_DECAY = 0.01


def timed_phases(loop: Loop, steps: int, meter) -> dict[str, list[float]]:
    """ms of the loop's phases, by events, and of the whole step by the host's clock.

    With several micro-batches, of their forwards and of their backwards together.
    """
    times: dict[str, list[float]] = {"step": []}
    for _ in range(steps):
        began = time.perf_counter()
        marks, phases = [meter.event()], []
        for phase in loop.gradients():
            phases.append(phase)
            marks.append(meter.event())
        loop.update()
        marks.append(meter.event())
        meter.synchronize()
        times["step"].append((time.perf_counter() - began) * 1e3)
        of_step: dict[str, float] = {}
        for phase, (first, second) in zip([*phases, "optimizer"], itertools.pairwise(marks), strict=True):
            of_step[phase] = of_step.get(phase, 0.0) + first.elapsed_time(second)
        for phase, ms in of_step.items():
            times.setdefault(phase, []).append(ms)
    return times


def timed_whole(run: Callable, steps: int, meter) -> dict[str, list[float]]:
    whole = []
    for _ in range(steps):
        began = time.perf_counter()
        run()
        meter.synchronize()
        whole.append((time.perf_counter() - began) * 1e3)
    return {"step": whole}


def observe(loop: Loop, meter) -> dict:
    """One more step, eager: what is allocated after every layer and at the end of backward, and whose bytes they are.

    Under gradient accumulation, the end of the last backward. ``requested_bytes`` are there what tensors asked for.
    """
    timeline: list[tuple[str, int]] = []

    def mark(what: str):
        return lambda *_: timeline.append((what, meter.allocated()))

    handles = [layer.register_forward_hook(mark("forward")) for layer in loop.layers]
    handles += [layer.register_full_backward_hook(mark("backward")) for layer in loop.layers]
    for _ in loop.gradients():
        pass
    meter.synchronize()
    timeline.append(("end of backward", meter.allocated()))
    requested = meter.requested()
    weights = storage_bytes(loop.weight_tensors())
    gradients = storage_bytes(loop.gradient_tensors())
    owned = storage_bytes(loop.owned_weights())
    loop.update()
    states = storage_bytes(_states(loop.optimizers()))
    timeline.append(("optimizer", meter.allocated()))
    for handle in handles:
        handle.remove()
    return {
        "timeline": timeline,
        "pools": {
            "weights": sum(weights.values()),
            "states": sum(bytes for place, bytes in states.items() if place not in weights),
            "gradients": sum(gradients.values()),
        },
        "requested_bytes": requested,
        "owned_weight_bytes": sum(owned.values()),
    }


def _states(optimizers: list) -> list[Tensor]:
    """What they hold, and what they step in place of the weights, such as fp32 masters."""
    found = []
    for optimizer in optimizers:
        state = getattr(optimizer, "state", {})
        found += tensors_in(list(state.values()) if isinstance(state, dict) else state)
        found += tensors_in([group["params"] for group in getattr(optimizer, "param_groups", ())])
    return found


def measure(bench: Bench, cell: Cell, device: str) -> dict:
    """The cell's numbers.

    The peak is the allocator's over warm-up and timed steps; over ranks it is the largest rank's, after the model's
    set-up, and the step is the slowest rank's.
    """
    arm, gauge = arms.get(cell.arm), meter(device)
    bucket = None if cell.bucket_mb is None else cell.bucket_mb << 20
    settings = Settings(bench.lr, WEIGHT_DECAY, bucket)
    gauge.reset_peak()
    layout = cell.layout(bench.world_size)
    shape = replace(get_shape(cell.shape), liger=cell.liger)
    loop = prepare(shape, arm, device, cell.batch, cell.sequence, settings, layout)
    if cell.checkpointing and layout is None:
        getattr(loop.model, "module", loop.model).gradient_checkpointing_enable()
    if arm.over_ranks:
        gauge.release()
        gauge.reset_peak()
    run = stepper(loop)
    for _ in range(bench.warm_up):
        run()
    gauge.synchronize()
    times = timed_whole(run, bench.steps, gauge) if arm.captured else timed_phases(loop, bench.steps, gauge)
    answer = {
        "ms": {phase: round(statistics.median(values), 3) for phase, values in times.items()},
        "quartiles_ms": [round(value, 3) for value in statistics.quantiles(times["step"], n=4)],
        "peak_bytes": gauge.peak(),
        "reserved_bytes": gauge.reserved(),
        "loss": run().item(),
        **observe(loop, gauge),
    }
    if arm.over_ranks:
        ranks: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, answer)
        answer["ms"] = {phase: max(rank["ms"][phase] for rank in ranks) for phase in answer["ms"]}
        answer["ranks_peak_bytes"] = [rank["peak_bytes"] for rank in ranks]
        answer["peak_bytes"] = max(answer["ranks_peak_bytes"])
    return answer


def answer_to(message: dict, device: str) -> dict:
    """What an order asks for, or the reason why there is no number."""
    bench, cell = Bench(**message["bench"]), Cell(**message["cell"])
    arm = arms.get(cell.arm)
    answer = {"cell": message["cell"], "against": arm.against or bench.baseline, "approximate": arm.approximate}
    before = provenance.gpus()
    try:
        # A judge is not run twice in a results file.
        layout = cell.layout(bench.world_size)
        checked = message["parity"] or parity(cell.arm, get_shape(cell.shape).kind, device, layout, cell.liger)
        answer["parity"] = checked
        if (why := refusal(arm, checked)) is not None:
            return {**answer, "refused": why}
        meter(device).release()
        answer |= measure(bench, cell, device)
    except ModuleNotFoundError as missing:
        wanted = arm.package or missing.name
        return {**answer, "left_out": f"{wanted} is not installed ({missing}); pip install '.[bench,peers,deepspeed]'"}
    except NotImplementedError as refused:
        return {**answer, "left_out": str(refused)}
    except torch.OutOfMemoryError as error:
        answer["out_of_memory"] = str(error).splitlines()[0]
    return {**answer, "gpus_before": before, "gpus_after": provenance.gpus()}


@contextmanager
def groups(message: dict, device: str) -> Iterator[None]:
    """megatron-core's, where the cell asks for them."""
    layout = Cell(**message["cell"]).layout(message["bench"]["world_size"])
    if layout is None:
        yield
        return
    quiet.hush()
    cpu.enable("cpu" if device == "cpu" else "cuda")
    with distributed.model_parallel(layout.parallel):
        yield


def main(order: Path, answer: Path) -> None:
    message = json.loads(order.read_text())
    rank, device = int(os.environ.get("RANK", "0")), message["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device = f"cuda:{torch.cuda.current_device()}"
    over_ranks = "RANK" in os.environ
    if over_ranks:
        how = {} if device == "cpu" else {"device_id": torch.device(device)}
        dist.init_process_group("gloo" if device == "cpu" else "nccl", **how)
    try:
        with groups(message, device):
            made = answer_to(message, device)
        if rank == 0:
            answer.write_text(json.dumps(made))
    finally:
        if over_ranks:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
