"""Tables that the host makes and kernels read.

A launch that is being captured reads its table at every replay, and a copy from the host can't be captured
without the host's memory. Its table is filled once the capture has ended, and belongs to the graph from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

_to_be_filled: list[tuple[Tensor, Tensor]] = []


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` in the memory of ``device``; during a capture, once :func:`fill_captured` has been called."""
    if device.type == "cpu":
        return host
    if is_capturing(device):
        table = torch.empty_like(host, device=device)
        _to_be_filled.append((table, host))
        return table
    return host.pin_memory().to(device, non_blocking=True)


def fill_captured() -> list[Tensor]:
    """Fills the tables of a capture that has ended or failed; the graph needs them for as long as it is replayed."""
    tables = []
    for table, host in _to_be_filled:
        table.copy_(host)
        tables.append(table)
    _to_be_filled.clear()
    return tables
