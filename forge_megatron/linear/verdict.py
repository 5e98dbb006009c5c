"""What the pre-flight of one graph task finds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forge_megatron.linear.owned import OwnedWeight


@dataclass(frozen=True)
class GraphTask:
    """A backward that was pre-flighted.

    Attributes:
        wanted: the owned weights whose gradient it asks for.
        running: dead once the engine has let go of the graph task, be it finished or failed.
        nested: it runs inside another (a reentrant checkpoint's), which has recomputed its forward.
    """

    wanted: frozenset[OwnedWeight]
    running: weakref.ref[Callable[[], None]]
    nested: bool


class Verdict(NamedTuple):
    """What becomes of a weight's gradient in one graph task.

    Attributes:
        waits: it is kept to ``step()``.
        micro_batch: the number, from 1, of the window's micro-batch that it belongs to.
    """

    waits: bool
    micro_batch: int
