"""What NVML says of this machine's GPUs, without making a CUDA context on any of them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A visible GPU; memory in bytes, processes as NVML sees them (none from outside a container)."""

    name: str
    free_bytes: int
    total_bytes: int
    processes: tuple[int, ...]


def _handles(nvml) -> list:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        by = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        handles.append(by(int(name) if name.isdigit() else name))
    return handles


def query() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order.

    Raises:
        ModuleNotFoundError: nvidia-ml-py is not installed.
        OSError: NVML does not answer.
    """
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise OSError(f"NVML does not answer: {error}") from error
    try:
        found = []
        for number, handle in enumerate(_handles(nvml)):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            pids = tuple(process.pid for process in processes)
            found.append(Gpu(f"GPU {number}", memory.free, memory.total, pids))
        return found
    except nvml.NVMLError as error:
        raise OSError(f"NVML does not answer: {error}") from error
    finally:
        nvml.nvmlShutdown()
