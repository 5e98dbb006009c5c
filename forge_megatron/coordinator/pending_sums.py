"""What ``step()`` does with gradients that are summed over ranks first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from forge_megatron.coordinator.decision import Decision
from forge_megatron.coordinator.partial import PartialSums
from forge_megatron.coordinator.pending import Pending
from forge_megatron.linear.counts import raise_counts


@dataclass(frozen=True)
class PendingSums:
    """As :class:`Pending`, of gradients that are partial over ranks.

    Attributes:
        schedule: which sums and steps them.
        reduced: those whose sums DistributedDataParallel has left in ``.grad``.
    """

    schedule: PartialSums
    reduced: Pending

    def measure(self) -> None:
        self.schedule.keep_sums()
        self.reduced.measure()

    def apply(self, decision: Decision, states: Mapping[Tensor, Mapping[str, Tensor]]) -> list[Tensor]:
        """As :meth:`Pending.apply`; what backward has stepped counts too."""
        counts = [states[p]["step"] for p in self.schedule.step_all(decision.multiplier)]
        raise_counts(counts)
        return counts + self.reduced.apply(decision, states)
