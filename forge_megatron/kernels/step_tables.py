"""The tables by which one launch of the multi-tensor step finds its weights: a row of addresses for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .slot import Slot
from .uploads import is_capturing, upload

#: Elements that one program steps.
BLOCK = 2048

#: Tables that are kept on the device: one for each group of a sharded model, whose gradients come to lie in few places.
MAX_TABLES = 1024

_tables: dict[tuple, Tensor] = {}
_owners: dict[tuple, Tensor] = {}


class Row(NamedTuple):
    """A row without the address of the gradient, which alone changes from step to step.

    Attributes:
        blocks: programs that step the weight.
        before, after: the columns on either side of the gradient's address, but for the first two.
    """

    blocks: int
    before: tuple[int, ...]
    after: tuple[int, ...]


def row_of(slot: Slot, grad: Tensor) -> Row:
    """The row of a dense slot."""
    blocks = triton.cdiv(grad.numel(), BLOCK)
    if slot.is_scaled:
        blocks = triton.cdiv(slot.blocks, BLOCK // 64)
    norm_sq = 0 if slot.norm_sq is None else slot.norm_sq.data_ptr()
    weight, *rest = (tensor.data_ptr() for _, tensor in slot.tensors())
    noise = 0 if slot.noise is None else slot.noise.words.data_ptr()
    columns = slot.weight.shape[-1] if slot.weight.dim() else 1
    of_weight = () if slot.weight_scale is None else (slot.weight_scale,)
    scales = (scale.data_ptr() for scale in (*slot.scales, *of_weight))
    before = (grad.numel(), norm_sq, slot.scalars.data_ptr(), weight)
    return Row(blocks, before, (noise, columns, *rest, *scales))


def device_table(rows: Sequence[Row], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``(table, owners)``: int64 ``[weights, columns]``, and int32 ``[programs]``, each program's row."""
    lines = []
    first = 0
    for row, grad in zip(rows, grads, strict=True):
        lines.append((row.blocks, first, *row.before, grad.data_ptr(), *row.after))
        first += row.blocks
    blocks = tuple(row.blocks for row in rows)
    device = grads[0].device
    if is_capturing(device):
        # What is forgotten below would still be read by a graph.
        return upload(torch.tensor(lines, dtype=torch.int64), device), upload(_rows_of_programs(blocks), device)
    table = (device, *lines)
    if table not in _tables:
        _keep(_tables, table, upload(torch.tensor(lines, dtype=torch.int64), device))
    owners = (device, *blocks)
    if owners not in _owners:
        _keep(_owners, owners, upload(_rows_of_programs(blocks), device))
    return _tables[table], _owners[owners]


def _keep(kept: dict[tuple, Tensor], key: tuple, made: Tensor) -> None:
    if len(kept) >= MAX_TABLES:
        kept.clear()
    kept[key] = made


def _rows_of_programs(blocks: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(blocks), dtype=torch.int32), torch.tensor(blocks))
