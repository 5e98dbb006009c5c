"""What the book of owned weights asks of their optimizer."""

from __future__ import annotations

from typing import Protocol

from torch.nn.parallel import DistributedDataParallel


class Client(Protocol):
    """What the pre-flight asks of the optimizer."""

    def expect_ready(self) -> None:
        """Raises if this backward could not be followed by an exact step; changes nothing."""

    def accumulates_ordinary(self) -> bool:
        """Inside a backward: it adds to the ``.grad`` of a parameter of this optimizer that is not owned."""

    def added_here(self) -> str | None:
        """Inside a backward: the name of such a parameter to whose ``.grad`` it has added already."""

    def before_updates(self) -> None:
        """Writes the hyperparameters: this backward is about to update weights."""

    def enter_wrapper(self, wrapper: DistributedDataParallel) -> None:
        """Raises unless owned weights can be trained inside it; called in its forward."""
