"""What tuning has chosen, by kind of launch: a table that is replaced as a whole, and read when a launch is prepared.

Without an entry a launch is chosen by :mod:`.choice`, as before any tuning.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from .hopper_config import Config
from .lookups import is_lookup
from .slot import Segment, Slot, of_codes
from .tiles import Tile

#: Where a slot's memo has what its launches were chosen to be, by tokens.
_CHOSEN = "chosen"

#: Numbers of tokens of which a table shows the choice.
SHOWN = 4


@dataclass(frozen=True)
class Candidate:
    """A kernel and one configuration of it; None: it chooses by itself, or has none."""

    kernel: str
    configuration: Config | Tile | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} {self.name}".rstrip()


@dataclass(frozen=True)
class Cell:
    """The steps that are launched alike: of one pair of contiguous factors, without an accumulator.

    Attributes:
        device: its name.
        backend: what the user asked for.
        rule: its name.
        shape: of the weight, ``[O, I]``.
        tokens: of the factors.
        factors, weight, states: their dtypes, without ``torch.``
        master: whether there is one.
        stochastic: whether the weight is rounded so.
    """

    device: str
    backend: str
    rule: str
    shape: tuple[int, int]
    tokens: int
    factors: str
    weight: str
    states: tuple[str, ...]
    master: bool
    stochastic: bool

    @classmethod
    def of(cls, slot: Slot, factors: torch.dtype, tokens: int, backend: str) -> Cell:
        slot = of_codes(slot)
        return cls(
            device=_name_of(slot.weight.device),
            backend=backend,
            rule=slot.rule.name,
            shape=tuple(slot.weight.shape),
            tokens=tokens,
            factors=_short(factors),
            weight=_short(slot.weight.dtype),
            states=tuple(_short(state.dtype) for state in slot.states),
            master=slot.master is not None,
            stochastic=slot.noise is not None,
        )

    def __str__(self) -> str:
        return f"{self.rule} {list(self.shape)} {self.weight}, {self.tokens} tokens"


_table: Mapping[Cell, Candidate] = MappingProxyType({})
_generation = 0


def install(chosen: Mapping[Cell, Candidate]) -> None:
    """Adds to the table."""
    _replace({**_table, **chosen})


def clear() -> None:
    """Empties the table."""
    _replace({})


def _replace(table: Mapping[Cell, Candidate]) -> None:
    global _table, _generation
    _table = MappingProxyType(table)
    _generation += 1


def generation() -> int:
    """Of the table: launches that a slot remembers were chosen by the one of their time."""
    return _generation


def lookup(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, backend: str) -> Candidate | None:
    """Return what was tuned for these operands; None: nothing was."""
    if not _table or accumulator is not None or len(segments) != 1 or is_lookup(segments[0]):
        return None
    if slot.rule.on_scratch or slot.rule.stages is not None:
        return None
    dy, x = segments[0]
    held = [tensor for _, tensor in slot.tensors()]
    if dy.dtype is not x.dtype or not all(_lies_plainly(tensor) for tensor in (dy, x, *held)):
        return None
    return _table.get(Cell.of(slot, dy.dtype, dy.shape[0], backend))


def note(slot: Slot, tokens: int, candidate: Candidate, *, tuned: bool) -> None:
    """Keeps what a launch of ``slot`` was chosen to be, for :func:`describe`."""
    noted = slot.memo.setdefault(_CHOSEN, {})
    noted[tokens] = _described(candidate, tuned)
    if len(noted) > SHOWN + 1:
        # Experts may have another number of tokens in each step.
        del noted[next(iter(noted))]


def describe(slot: Slot, backend: str) -> str:
    """Return the kernels of ``slot``, by number of tokens: those of its last launches, and what was tuned for it."""
    chosen = dict(of_codes(slot).memo.get(_CHOSEN, {}))
    for cell, candidate in _table.items():
        if cell == Cell.of(slot, getattr(torch, cell.factors), cell.tokens, backend):
            chosen[cell.tokens] = _described(candidate, True)
    shown = [f"{text} at {tokens} tokens" for tokens, text in list(chosen.items())[-SHOWN:]]
    return "; ".join(["…", *shown] if len(chosen) > SHOWN else shown)


def _described(candidate: Candidate, tuned: bool) -> str:
    return f"{candidate} (tuned)" if tuned else str(candidate)


def _lies_plainly(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
