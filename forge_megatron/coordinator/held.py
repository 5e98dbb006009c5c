"""What is kept from one step to the next: how gradients lie in buckets, and what this rank steps of each piece.

A piece has a slot of its own, for a launch remembers much of a slot, and to make one takes longer than to launch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forge_megatron.coordinator.bucket import Bucket, Piece, columns, rows_of
from forge_megatron.formats import in_memory
from forge_megatron.formats.code import scale_rows
from forge_megatron.kernels import Slot

#: Selections of parameters whose buckets are kept: a model whose parts are used by turns has several.
_MAX_CUTS = 16


class HeldCuts:
    """The buckets of selections of one schedule's parameters."""

    def __init__(self) -> None:
        self._cuts: dict[tuple, list[Bucket]] = {}

    def of(self, params: Sequence[Tensor], cut: Callable[[], list[Bucket]]) -> list[Bucket]:
        key = tuple((id(p), p.dtype) for p in params)
        if key not in self._cuts:
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            self._cuts[key] = cut()
        return self._cuts[key]


class HeldPieces:
    """The slots of one schedule's pieces, and where their norms go."""

    def __init__(self) -> None:
        self._slots: dict[tuple, tuple[Slot, int, Slot]] = {}
        self._norms: dict[tuple, Tensor] = {}

    def slot(self, slot: Slot, piece: Piece, rows: slice, norm_sq: Tensor | None) -> Slot:
        """``rows`` of the weight of ``slot``, of which this rank holds the states from ``piece.first`` on.

        Args:
            norm_sq: the same tensor at every call with one.
        """
        if slot.noise is not None and rows.start:
            # Where its random bits begin is copied, and counts the steps.
            return _part(slot, piece, rows, norm_sq)
        key = (piece.param, piece.first, rows.start, rows.stop, norm_sq is None)
        lies = in_memory(slot.weight)[0].data_ptr()
        known = self._slots.get(key)
        if known is None or known[0] is not slot or known[1] != lies:
            known = self._slots[key] = (slot, lies, _part(slot, piece, rows, norm_sq))
        part = known[2]
        part.rule = slot.rule
        return part

    def norm(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Where Σ g² of ``piece`` goes, 0-dim."""
        key = (piece.param, piece.first, piece.end, dtype)
        if key not in self._norms:
            self._norms[key] = torch.zeros((), dtype=dtype, device=piece.param.device)
        return self._norms[key]


def _part(slot: Slot, piece: Piece, rows: slice, norm_sq: Tensor | None) -> Slot:
    held = slice(piece.first, piece.first + rows.stop - rows.start)
    blocks = scale_rows(piece.param, held)
    return replace(
        slot,
        weight=rows_of(slot.weight, rows),
        states=tuple(rows_of(state, held) for state in slot.states),
        master=None if slot.master is None else rows_of(slot.master, held),
        scales=tuple(rows_of(scale, blocks) for scale in slot.scales),
        noise=None if slot.noise is None else slot.noise.after(rows.start * columns(piece.param)),
        update_norm_sq=None,
        late_norms=None,
        norm_sq=norm_sq,
    )
