"""Bytes and milliseconds of a device. A CPU has the same calls for rehearsals; its numbers are no measurement."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class CudaMeter:
    """CUDA's allocator and its events."""

    def __init__(self, device: str):
        self.device = device

    def event(self) -> torch.cuda.Event:
        """An event that has just been recorded."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def requested(self) -> int:
        """Of what is allocated, what was asked for: blocks are up to 1 MiB larger than the tensors in them."""
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class CpuEvent:
    """The host's clock with an event's one question."""

    def __init__(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        return (later.at - self.at) * 1e3


class CpuMeter:
    """The host's clock, and the tensors that Python can reach; the peak is of the moments when it was asked."""

    device = "cpu"

    def __init__(self):
        self._peak = 0

    def event(self) -> CpuEvent:
        return CpuEvent()

    def synchronize(self) -> None:
        pass

    def allocated(self) -> int:
        found = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
        found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
        held = sum(storage_bytes(found).values())
        self._peak = max(self._peak, held)
        return held

    requested = allocated

    def reset_peak(self) -> None:
        self._peak = self.allocated()

    def peak(self) -> int:
        return max(self._peak, self.allocated())

    def reserved(self) -> int:
        return self.peak()

    def release(self) -> None:
        gc.collect()


def meter(device: str) -> CudaMeter | CpuMeter:
    return CpuMeter() if device == "cpu" else CudaMeter(device)


def storage_bytes(found: list[Tensor]) -> dict[int, int]:
    """Bytes of each storage on this rank, by its address, so that views and ties count once."""
    held: dict[int, int] = {}
    for tensor in found:
        for part in _parts(tensor):
            held[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    held.pop(0, None)
    return held


def _parts(tensor: Tensor) -> list[Tensor]:
    if isinstance(tensor, DTensor):
        return [tensor.to_local()]
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [] if tensor.is_meta else [tensor]


def tensors_in(thing, depth: int = 4) -> list[Tensor]:
    """The tensors in nested dicts, lists and objects, such as an optimizer's state."""
    if isinstance(thing, Tensor):
        return [thing]
    if depth == 0 or isinstance(thing, (str, int, float, type(None), type)) or callable(thing):
        return []
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, (list, tuple)):
        inside = thing
    else:
        inside = vars(thing).values() if hasattr(thing, "__dict__") else ()
    return [tensor for each in inside for tensor in tensors_in(each, depth - 1)]
