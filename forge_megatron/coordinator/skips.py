"""Steps whose gradient was not finite: counted and told without waiting for the device."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Skip:
    """A step whose gradient was not finite.

    Attributes:
        step: which call of ``step()`` since attach, from 1.
        whole: nothing was changed; False: the coordinates with a finite gradient were stepped.
        names: the parameters whose gradient was not finite on this rank.
    """

    step: int
    whole: bool
    names: tuple[str, ...]

    def __str__(self) -> str:
        others = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        bad = f"the gradient of {', '.join(self.names[:3])}{others}"
        if not self.names:
            bad = "a gradient of another rank or optimizer, or the gradient_multiplier,"
        left = "nothing was changed" if self.whole else "those coordinates were left as they were"
        return f"step {self.step}: {bad} is not finite; {left}"


@dataclass(frozen=True)
class _Unread:
    """A step whose norms are on their way to the host; ``arrived`` is None where they are there already."""

    step: int
    norms: Tensor
    arrived: torch.Event | None
    names: Sequence[str]
    whole: bool
    counts: Sequence[Tensor]
    running: Sequence[tuple[Tensor, float]]


class Skips:
    """Reads the norms of a step once they have reached the host, at the latest one step later.

    A step that is skipped on the device has been counted on the host by then: its step counts and its rules' running
    numbers are taken back, before the next update's bias corrections are computed from them.

    Attributes:
        count: steps whose gradient was not finite, as far as they have been read.
        by_name: of them, those in which this parameter's was not, on this rank.
        callbacks: called with each :class:`Skip`.
        held: a step that is being captured is observed by whoever replays it.
    """

    def __init__(self):
        self.count = 0
        self.by_name: Counter[str] = Counter()
        self.held = False
        self.callbacks: OrderedDict[int, Callable[[Skip], None]] = OrderedDict()
        self._steps = 0
        self._unread: deque[_Unread] = deque()

    def observe(
        self,
        norms: Tensor,
        total: Tensor,
        names: Sequence[str],
        *,
        whole: bool,
        counts: Sequence[Tensor],
        running: Sequence[tuple[Tensor, float]],
    ) -> None:
        """Notes a step that has just been launched.

        Args:
            norms: of each parameter's gradient (or their squares), ``[parameters]``.
            total: over all ranks, 0-dim.
            names: of the parameters.
            whole: the step was not taken if ``total`` is not finite.
            counts: the step counts that were raised, on the host.
            running: the running numbers that were changed, with what they were before.
        """
        if self.held:
            return
        self._steps += 1
        values = torch.cat([norms.float(), total.float().reshape(1)])
        arrived = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)
            arrived = torch.Event("cuda")
            arrived.record(torch.cuda.current_stream(total.device))
        self._unread.append(_Unread(self._steps, values, arrived, names, whole, counts, running))

    def settle_counts(self) -> None:
        """Before a step's bias corrections are computed: waits where the last step may not have been taken.

        A whole forward and backward have been launched since then, so that the device is not idle meanwhile.
        """
        if any(unread.whole for unread in self._unread):
            self.settle(wait=True)

    def settle(self, *, wait: bool = False) -> None:
        """Reads what has arrived, and with ``wait`` also what has not."""
        while self._unread:
            unread = self._unread[0]
            if unread.arrived is not None and not unread.arrived.query():
                if not wait:
                    return
                unread.arrived.synchronize()
            self._unread.popleft()
            self._read(unread)

    def _read(self, unread: _Unread) -> None:
        bad = ~torch.isfinite(unread.norms)
        if not bad.any():
            return
        if unread.whole and bad[-1]:
            for count in unread.counts:
                count.sub_(1)
            for number, before in unread.running:
                number.fill_(before)
        self.count += 1
        names = tuple(name for name, is_bad in zip(unread.names, bad[:-1].tolist(), strict=True) if is_bad)
        self.by_name.update(names)
        skip = Skip(unread.step, unread.whole, names)
        _logger.warning("%s", skip)
        for callback in list(self.callbacks.values()):
            callback(skip)
