"""How long launches take on a device, without the host's time for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

#: Launches of one sample, and samples of which the median is taken.
LAUNCHES, SAMPLES = 24, 7

#: Of a GPU's clock; a slower one sleeps longer than it has to.
CYCLES_PER_S = 2.0e9

#: The sleep, in times that the host takes for the launches behind it.
ASLEEP = 1.5


def device_us(launches: Sequence[Callable[[], None]], device: torch.device) -> float:
    """Return the median µs of one of ``launches``, which are repeated one after another on the current stream.

    A GPU sleeps until the host has queued a sample, so that it never waits for the host. No graph is captured: its
    memory, and cuBLAS' workspace on its stream, would outlive it.
    """
    if device.type != "cuda":
        return _host_us(launches)
    for launch in launches:
        launch()
    torch.cuda.synchronize(device)
    rounds = max(1, LAUNCHES // len(launches))
    began = time.perf_counter()
    _queue(launches, rounds)
    cycles = int((time.perf_counter() - began) * ASLEEP * CYCLES_PER_S)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(SAMPLES):
        torch.cuda._sleep(cycles)
        start.record()
        _queue(launches, rounds)
        end.record()
        torch.cuda.synchronize(device)
        samples.append(start.elapsed_time(end))
    return sorted(samples)[SAMPLES // 2] * 1e3 / (rounds * len(launches))


def _queue(launches: Sequence[Callable[[], None]], rounds: int) -> None:
    for _ in range(rounds):
        for launch in launches:
            launch()


def _host_us(launches: Sequence[Callable[[], None]]) -> float:
    began = time.perf_counter()
    _queue(launches, 1)
    return (time.perf_counter() - began) * 1e6 / len(launches)
