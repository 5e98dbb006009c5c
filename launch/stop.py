"""Stopping at a step boundary: a signal on any rank becomes every rank's decision."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context in which SIGTERM and SIGINT set ``requested`` instead of ending the process.

    The flag is local: the training loop reduces it over all ranks with the step's loss, because a
    launcher may signal a single rank, and a rank that left alone would hang the others.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self._previous: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.name = signal.Signals(number).name

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
