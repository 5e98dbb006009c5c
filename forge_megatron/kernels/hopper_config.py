"""How the Hopper kernel cuts a gradient into tiles and shared memory into buffers, by shape and tokens.

Fixed, so that a step neither tunes on live weights nor differs between replicas.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from .cost import MEASURED_BYTES, hopper_us

#: Shared memory of a CTA, less what barriers and reductions take.
SHARED_BYTES = 232_448 - 1024

MAX_SLOTS = 8


@dataclass(frozen=True)
class Config:
    """One launch configuration.

    Attributes:
        pingpong: the two consumers take alternate tiles; otherwise both share a tile.
        panels: 64-row panels of a consumer's tile.
        block_i: columns of a tile.
        block_t: tokens of a stage.
        stages: stages of operands.
        slots: sub-tiles of weight and state in shared memory; even without ``pingpong``.
        group: rows of tiles that are walked together, column by column, and share X in L2.
        chunks: columns of a sub-tile are stepped in so many parts: fewer registers at once.
        sub_i: columns of a sub-tile.
    """

    pingpong: bool
    panels: int
    block_i: int
    block_t: int
    stages: int
    slots: int
    group: int
    chunks: int = 2
    sub_i: int = 64

    @property
    def block_o(self) -> int:
        return 64 * self.panels * (1 if self.pingpong else 2)

    def shared_bytes(self, element_bytes: int) -> int:
        """Bytes of the rings, with ``element_bytes`` of weight and states for each coordinate."""
        stage = 2 * self.block_t * (self.block_o + self.block_i)
        return self.stages * stage + self.slots * 64 * self.sub_i * element_bytes

    def tiles(self, rows: int, columns: int) -> int:
        return -(-rows // self.block_o) * -(-columns // self.block_i)


#: By name; ``slots`` is what fits with a bf16 weight and two bf16 states.
CONFIGS = {
    "pp64": Config(True, 1, 128, 64, stages=5, slots=4, group=8),
    "pp128": Config(True, 2, 128, 64, stages=4, slots=4, group=4, chunks=4),
    "co256": Config(False, 1, 256, 32, stages=5, slots=4, group=4, chunks=4),
}


@functools.cache
def choose_config(
    rows: int,
    columns: int,
    tokens: int,
    element_bytes: int = MEASURED_BYTES,
    stochastic: bool = False,
    experts: int = 1,
) -> str:
    """Return the configuration that :mod:`.cost` expects to be the fastest for an ``[rows, columns]`` gradient.

    Args:
        tokens: of all segments together.
        element_bytes: of weight, master, states and accumulator together, for one coordinate.
        stochastic: whether the weight is rounded so.
        experts: gradients of this shape, which share the tokens.
    """
    return min(CONFIGS, key=lambda name: hopper_us(name, rows, columns, tokens, element_bytes, stochastic, experts))


@functools.cache
def fit(config: Config, widest: int, element_bytes: int) -> Config | None:
    """Return ``config`` with sub-tiles, slots and stages that fit a weight's storage.

    A sub-tile's widest row is 128 bytes: shorter rows read the DRAM worse, longer ones are
    cut in two by the swizzle.

    Args:
        widest: bytes of the widest element among the weight, its master, its states and its accumulator.
        element_bytes: bytes of all of them together, for one coordinate.

    Returns:
        None where not even two slots fit.
    """
    sub_i = 128 // widest
    step = 1 if config.pingpong else 2
    stages = config.stages
    while True:
        bare = replace(config, sub_i=sub_i, stages=stages, slots=0)
        slots = (SHARED_BYTES - bare.shared_bytes(0)) // (64 * sub_i * element_bytes)
        slots = min(slots - slots % step, MAX_SLOTS)
        if slots >= 4 or (slots >= config.slots and stages == config.stages) or stages <= 3:
            break
        stages -= 1
    if slots < 2:
        return None
    if sub_i == config.sub_i and slots >= config.slots:
        slots = config.slots
    return replace(bare, slots=slots)
