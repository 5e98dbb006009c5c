"""Tables that the host makes and kernels read.

A launch that is being captured reads its table at every replay. The table cannot lie in the graph's own memory, which
other kernels of the graph have had before it and write again at each replay; it is cut from memory that was reserved
before the capture, and filled once the capture has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Bytes to which a table is aligned, and bytes of one weight's rows at most: of its step's and its norm's tables.
ALIGNMENT = 256
ROW_BYTES = 1024

#: What another part of a weight that has launches of its own adds, twice: where norms come first, in the step too.
TABLE_BYTES_OF_A_PIECE = 2 * (ROW_BYTES + 4 * ALIGNMENT)

#: Fewest elements of a weight that one program of a step takes, for each of which a table has an int32.
FEWEST_ELEMENTS = 2048

_reserved: Tensor | None = None
_used = 0
_to_be_filled: list[tuple[Tensor, Tensor]] = []


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` in the memory of ``device``; during a capture, once its :func:`reserved` region has ended.

    Raises:
        RuntimeError: a capture that has reserved nothing, or too little.
    """
    if device.type == "cpu":
        return host
    if is_capturing(device):
        table = _cut(host)
        _to_be_filled.append((table, host))
        return table
    return host.pin_memory().to(device, non_blocking=True)


def write_table(table: Tensor, host: Tensor) -> None:
    """Copies ``host`` into ``table``. The host goes on: from memory that is not pinned it would wait for the device."""
    table.copy_(host.pin_memory() if table.is_cuda else host, non_blocking=True)


def table_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes that the tables of one step of ``weights`` take at most."""
    return sum(ROW_BYTES + 4 * ALIGNMENT + 4 * -(-weight.numel() // FEWEST_ELEMENTS) for weight in weights)


@contextmanager
def reserved(size: int, device: torch.device) -> Iterator[Tensor]:
    """Around a capture: ``size`` bytes for its tables, which are filled at the end.

    Yields:
        The memory, which the graph needs for as long as it is replayed.
    """
    global _reserved, _used
    _reserved, _used = torch.empty(max(size, 1), dtype=torch.uint8, device=device), 0
    try:
        yield _reserved
    finally:
        for table, host in _to_be_filled:
            table.copy_(host)
        _to_be_filled.clear()
        _reserved = None


def _cut(host: Tensor) -> Tensor:
    global _used
    size = host.numel() * host.element_size()
    if _reserved is None or _used + size > _reserved.numel():
        left = "none were reserved" if _reserved is None else f"{_reserved.numel() - _used} reserved ones are left"
        raise RuntimeError(
            f"a captured step needs a table of {size} bytes for the kernels, and {left}; capture it with "
            "optimizer.capture()"
        )
    table = _reserved[_used : _used + size].view(host.dtype).view(host.shape)
    _used += -(-size // ALIGNMENT) * ALIGNMENT
    return table
