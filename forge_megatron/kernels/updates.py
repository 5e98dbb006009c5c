"""How far a step moves a weight, measured around the launch where it was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .slot import Slot

_NOTHING = nullcontext()


def measured(slots: Sequence[Slot]) -> AbstractContextManager[None]:
    """Writes ``‖W' - W‖²`` to ``slot.update_norm_sq`` of the slots that have one.

    Inside, one copy of each such weight exists (of its master, where there is one: a step smaller than the
    weight's own rounding is a step).
    """
    if all(slot.update_norm_sq is None for slot in slots):
        return _NOTHING
    return _measuring([slot for slot in slots if slot.update_norm_sq is not None])


@contextmanager
def _measuring(slots: Sequence[Slot]) -> Iterator[None]:
    before = [slot.stepped().clone() for slot in slots]
    yield
    for slot, old in zip(slots, before, strict=True):
        moved = slot.stepped().float() - old.float()
        slot.update_norm_sq.copy_(torch.linalg.vector_norm(moved, dtype=torch.float64).square())
