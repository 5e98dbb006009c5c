"""What the ranks of a data-parallel group tell each other of their weights, in one small collective over the hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_megatron.coordinator.ranks import Ranks
from forge_megatron.coordinator.window import Client, Window


@dataclass(frozen=True)
class Meeting:
    """Of all ranks together.

    Attributes:
        at_step: every rank is in ``step()``; False: a backward ends on some.
        arrived: a backward has completed it on some rank.
        present: some rank has a part of it.
        missed: no backward has completed it on some rank.
        held: some rank keeps a part of it to ``step()``.
    """

    at_step: bool
    arrived: set[Tensor]
    present: set[Tensor]
    missed: set[Tensor]
    held: set[Tensor]


def room(names: Mapping[Tensor, str]) -> int:
    """The most marks that the ranks tell each other at once."""
    return 5 * len(names) + 3


def meet(
    ranks: Ranks,
    names: Mapping[Tensor, str],
    window: Window,
    *,
    held: set[Tensor],
    pending: set[Tensor],
    facts: dict[str, object],
    at_step: bool,
    measures: bool,
) -> Meeting:
    """At the end of a backward, or in ``step()``.

    Args:
        names: of the parameters, in the order that all ranks have.
        held, pending: weights that this rank keeps a part of, and parameters that have one in ``step()``.
        facts: what must be equal on every rank.
        measures: this rank, which is in ``step()``, needs the norms before anything is stepped.

    Raises:
        ValueError: a fact differs, or only some ranks need norms first.
        RuntimeError: a rank did not come; or a weight was stepped in backward without the part that a rank holds.
    """
    mine = window.arrived, window.arrived | pending, names.keys() - window.arrived, held, held & window.done
    marks = _marks(names, *mine, not at_step, at_step and measures, at_step and not measures)
    ranks.agree("the end of a backward, or step()", facts, marks)
    arrived, present, missed, held, lost = _sets(names, marks[:-3], len(mine))
    *_, in_backward, norms_first, steps_first = marks.tolist()
    if norms_first and steps_first:
        raise ValueError(
            "step(): some ranks have asked for the norm of the gradients first (clip_grad_norm_(), norms_sq(), a "
            "GradScaler) and others have not; ask for it on every rank"
        )
    if lost:
        raise RuntimeError(
            f"{next(name for p, name in names.items() if p in lost)}: stepped in backward without a part that a rank "
            "found to wait only later, in a reentrant checkpoint; load a checkpoint, and attach with waiting=True"
        )
    return Meeting(not in_backward, arrived, present, missed, held)


def waiting_anywhere(ranks: Ranks, client: Client, waiting: Collection[Tensor]) -> Callable[[], set[Tensor]]:
    """At the start of a backward, or in ``step()``, where what the ranks share is compared before anything is stepped.

    Returns:
        What waits for the other ranks, and gives the weights of which any of them keeps a part to ``step()``.
    """
    marks = _marks(client.names, waiting)
    agreed = ranks.agree_later("the start of a backward, or step()", client.shared_facts(), marks)

    def found() -> set[Tensor]:
        agreed()
        return _sets(client.names, marks, 1)[0]

    return found


def _marks(names: Mapping[Tensor, str], *marked: Collection[Tensor] | bool) -> Tensor:
    flat = [mark for part in marked for mark in ([part] if isinstance(part, bool) else [p in part for p in names])]
    return torch.tensor(flat, dtype=torch.uint8)


def _sets(names: Mapping[Tensor, str], marks: Tensor, count: int) -> list[set[Tensor]]:
    rows = marks.view(count, len(names)).tolist()
    return [{p for p, marked in zip(names, row, strict=True) if marked} for row in rows]
