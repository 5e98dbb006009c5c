"""Buffers in rotation: while one is being filled, others are on the wire or being stepped.

What is done with a full buffer is a generator that yields the handle of each collective it has issued. Every
rank issues the same collectives in the same order: that order follows from the order of the buckets alone,
never from which of them has arrived.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor


class Work(Protocol):
    """A collective under way, as ``torch.distributed`` returns it."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


Route = Iterator[Work]


class Pipeline:
    """Runs one route a bucket, each a collective behind the next bucket's.

    On a GPU the collectives are issued from, and the weights stepped on, a stream of its own: the host never
    waits, and the stream of backward waits only for a buffer that it is about to fill.

    Args:
        nbytes: of one buffer.
        count: buffers; with fewer buckets than that, as many as there are buckets.
        device: of weights and buffers.
        wait: waits for a collective on the host, with a time limit.
    """

    def __init__(self, nbytes: int, count: int, device: torch.device, wait: Callable[[Work], None]):
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._free: deque[Tensor] = deque(self._buffers)
        self._flying: deque[tuple[Route, Work, Tensor]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: dict[Tensor, torch.cuda.Event] = {}
        self._wait = wait

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self) -> Tensor:
        """A buffer whose last bucket is done, uint8."""
        while not self._free:
            with self._lane():
                self._advance_oldest()
        buffer = self._free.popleft()
        event = self._done.pop(buffer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return buffer

    def launch(self, route: Route, buffer: Tensor) -> None:
        """Starts a filled buffer on its route, then takes those before it one collective further."""
        older = len(self._flying)
        with self._lane(follow=True):
            self._resume(route, buffer)
            for _ in range(older):
                self._advance_oldest()

    def drain(self) -> None:
        """Ends every route; the current stream then sees what they wrote."""
        with self._lane():
            while self._flying:
                self._advance_oldest()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        # A step that is captured next may not wait for events of this one.
        self._done.clear()

    def drop(self) -> None:
        """Forgets what is under way, after a failure."""
        self._flying.clear()
        self._free = deque(self._buffers)
        self._done.clear()

    def _advance_oldest(self) -> None:
        route, work, buffer = self._flying.popleft()
        self._wait(work)
        self._resume(route, buffer)

    def _resume(self, route: Route, buffer: Tensor) -> None:
        work = next(route, None)
        if work is not None:
            self._flying.append((route, work, buffer))
            return
        if self._stream is not None:
            self._done[buffer] = self._stream.record_event()
        self._free.append(buffer)

    @contextlib.contextmanager
    def _lane(self, follow: bool = False) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        if follow:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
