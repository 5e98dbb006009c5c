"""Where a weight gradient's factors go: the interface, and the sink for a gradient that is complete.

The sinks for gradients that are not yet complete (in time, or over ranks) live in ``coordinator``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from forge_megatron import kernels
from forge_megatron.kernels import FormedRows, GroupedRows, Segment

if TYPE_CHECKING:
    from forge_megatron.linear.owned import OwnedWeight


class Sink(Protocol):
    """Receives the factors of one weight; called inside backward, under ``no_grad``."""

    def __call__(self, owned: OwnedWeight, segments: list[tuple[Tensor, Tensor]]) -> None:
        """``segments``: ``(dY [T, O], X [T, I])`` of every use of the weight that is complete now."""


class Later(Protocol):
    """The sink of factors that take more than their sum: what waits for other uses, or for ``step()``.

    Attributes:
        dtype: of the sum of a 16-bit weight; another's is fp32.
    """

    dtype: torch.dtype

    def __call__(self, owned: OwnedWeight, segments: Sequence[Segment] = (), task: int | None = None) -> None:
        """Sums up what ``owned.factors`` keeps, and ``segments``, which the graph task ``task`` brought."""


class Now(Sink, Protocol):
    """The sink of a gradient whose last use on this rank has run."""

    def accepts(self, owned: OwnedWeight, dy: Tensor | FormedRows | GroupedRows) -> bool:
        """It reads the factors during the call; otherwise they are kept in ``owned.factors``, and held.

        Args:
            owned: the weight.
            dy: of the last use.
        """

    def begin(self, waiting: Collection[Tensor]) -> None:
        """A backward is about to complete gradients, of these weights or others; nothing of it has been delivered.

        Args:
            waiting: the weights of which a part is kept to ``step()`` here.
        """

    def hold(self, owned: OwnedWeight) -> None:
        """The kept factors are complete; the sink reads them later."""

    def finish(self) -> None:
        """A backward that wanted gradients of owned weights has ended; not one that runs inside another."""

    def abandon(self) -> Collection[Tensor]:
        """A backward has raised: what it completed and nobody has seen is as if it had not been.

        Returns:
            The weights that are as they were here, and whose gradient others have.
        """


class FusedStep:
    """The gradient is complete here and now: one launch forms each tile and steps it in registers.

    Args:
        backend: of the kernels.
        scale: of every gradient.
    """

    def __init__(self, backend: str = "auto", scale: float = 1.0):
        self.backend = backend
        self._scale = scale
        self._multipliers: dict[torch.device, Tensor] = {}

    def __call__(self, owned: OwnedWeight, segments: list[tuple[Tensor, Tensor]]) -> None:
        # From here on, an interrupt leaves a weight that may have been stepped.
        owned.updated = True
        multiplier = None if self._scale == 1.0 else self._multiplier(owned.weight.device)
        summed = owned.factors.accumulator
        kernels.wgrad_step(owned.slot, segments, accumulator=summed, multiplier=multiplier, backend=self.backend)
        owned.uncounted = True
        owned.mark_updated()

    def _multiplier(self, device: torch.device) -> Tensor:
        if device not in self._multipliers:
            self._multipliers[device] = torch.tensor(self._scale, dtype=torch.float32, device=device)
        return self._multipliers[device]

    def accepts(self, owned: OwnedWeight, dy: Tensor | FormedRows | GroupedRows) -> bool:
        return True

    def begin(self, waiting: Collection[Tensor]) -> None:
        """Nobody else has a part of them."""

    def hold(self, owned: OwnedWeight) -> None:
        raise AssertionError(f"{owned.name}: a complete gradient is stepped at once")

    def finish(self) -> None:
        """Nothing is left to do."""

    def abandon(self) -> Collection[Tensor]:
        """Every gradient that was complete has been stepped."""
        return ()
