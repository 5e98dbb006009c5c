"""What a schedule over ranks knows of the optimizer, and of the time between two ``step()`` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from forge_megatron import kernels
from forge_megatron.coordinator.bucket import Bucket
from forge_megatron.linear import OwnedWeight


class Client(Protocol):
    """What the schedule asks of the optimizer."""

    owned: Mapping[Tensor, OwnedWeight]
    names: Mapping[Tensor, str]

    def slot(self, p: Tensor) -> kernels.Slot:
        """What a step of ``p`` reads and writes; makes the states of one that was frozen here."""

    def reads_whole(self, p: Tensor) -> bool:
        """Whether the rule of ``p`` reads more of its gradient than one coordinate."""

    def shared_facts(self) -> dict[str, object]:
        """What must be equal on every rank where they meet, before a step."""


@dataclass
class Window:
    """What lies between two ``step()`` calls.

    Attributes:
        arrived: the weights whose gradient on this rank was completed by a backward.
        stepping: those, and what other ranks have a gradient of, as far as it is known.
        waiting: waits for the other ranks and gives the weights of which any keeps a part to ``step()``, of which
            backward steps none; None: no backward has begun.
        passed: the buckets that are filled in backward have all been sent.
        done: what has been sent.
        agreed: the parameters of which any rank has a gradient; None before the ranks have met in ``step()``.
        kept: this rank's part of every summed bucket, where a norm over all of them comes before the first step.
        changed: the parameters of which a piece was stepped here.
        norms: those of each parameter's pieces that were stepped or kept here.
    """

    arrived: set[Tensor] = field(default_factory=set)
    stepping: set[Tensor] = field(default_factory=set)
    waiting: Callable[[], set[Tensor]] | None = None
    passed: bool = False
    done: set[Tensor] = field(default_factory=set)
    agreed: set[Tensor] | None = None
    kept: list[tuple[Bucket, Tensor]] | None = None
    changed: set[Tensor] = field(default_factory=set)
    norms: dict[Tensor, list[Tensor]] = field(default_factory=dict)

    def norms_sq(self, params: Sequence[Tensor], device: torch.device) -> Tensor:
        """Σ g² of each of ``params`` here, fp64: its pieces are added in their order."""
        pieces = [self.norms.get(p, []) for p in params]
        flat = [norm for one in pieces for norm in one]
        total = torch.stack(flat).double() if flat else torch.zeros(0, dtype=torch.float64, device=device)
        if any(len(one) != 1 for one in pieces):
            total = torch.stack([part.sum() for part in total.split([len(one) for one in pieces])])
        return total
