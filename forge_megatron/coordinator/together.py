"""What data-parallel ranks agree on around a captured step, whose replays meet nobody: all of them replay, or none."""

from __future__ import annotations

from enum import IntEnum

import torch

from forge_megatron import kernels
from forge_megatron.coordinator.alike import Disagreement
from forge_megatron.coordinator.partial import PartialSums


class Stage(IntEnum):
    """What a call of a captured function does; where ranks differ, all do what comes last here."""

    REPLAY = 0
    RECORD = 1
    RUN = 2


class Together:
    """Around the captured steps of one optimizer.

    Args:
        sums: its schedule over ranks; None: it is alone, and decides by itself.
    """

    def __init__(self, sums: PartialSums | None):
        self._sums = sums

    def stage(self, mine: Stage) -> Stage:
        """What this call does on every rank: a rank that runs or records needs the others in its meetings.

        Raises:
            RuntimeError: a rank did not come.
        """
        return Stage(self._largest("a call of a captured function", mine))

    def failed(self, error: Exception | None) -> bool:
        """Whether a rank could not capture its step. None may replay then, for the others would wait for that rank."""
        if isinstance(error, Disagreement):
            # The rank that failed is not in the meeting that this one was in, and has learned that here.
            return True
        try:
            return bool(self._largest("the end of a captured step", error is not None))
        except Disagreement:
            return True

    def expect_no_wrapper(self) -> None:
        """Raises ``NotImplementedError`` if DistributedDataParallel reduces a part of the gradients."""
        if self._sums is not None and self._sums.reduced_elsewhere:
            raise NotImplementedError(
                "capture() of a model inside DistributedDataParallel is not built; call the model without the wrapper, "
                "attach(process_group=...) reduces all of its gradients"
            )

    def table_bytes(self) -> int:
        """Of the tables that the launches of its buckets read, beside those of whole weights."""
        return 0 if self._sums is None else self._sums.pieces() * kernels.TABLE_BYTES_OF_A_PIECE

    def _largest(self, what: str, mine: int) -> int:
        if self._sums is None:
            return int(mine)
        marks = torch.tensor([int(mine)], dtype=torch.uint8)
        self._sums.ranks.agree(what, {}, marks)
        return int(marks)
