"""How the values of one optimizer state are stored, alone or in blocks that share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: Coordinates side by side in a row that share a scale; the last block of a row may be shorter.
BLOCK = 64

#: Of the scales of states and weights: a code's :attr:`Code.scale` has no more digits.
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Code:
    """A pair of ``tl`` functions, bound to a language as a rule is (:func:`forge_megatron.rules.bind`).

    Attributes:
        dtype: of the stored tensor, which has the weight's shape. The functions see e4m3 as the bytes
            of :func:`as_bytes`: languages agree on little that can be done with it.
        encode: ``(fp32 tile, scale) -> stored tile``, rounding to the nearest code.
        decode: ``(stored tile, scale) -> fp32 tile``.
        scale: ``largest magnitude of a block -> its scale``, both fp32, the latter a value of bfloat16; None: there
            is no scale, and ``encode`` and ``decode`` read none.
    """

    dtype: torch.dtype
    encode: Callable
    decode: Callable
    scale: Callable | None = None

    def store(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return codes of ``x``'s shape and scales ``[..., blocks]``, bfloat16, of an fp32 tensor."""
        if self.scale is None:
            return self.encode(x, None), None
        row = torch.atleast_1d(x)
        scale = self.scale(in_blocks(row.abs()).amax(-1))
        codes = self.encode(row, spread(scale, row.shape[-1]))
        return codes.view(self.dtype).view(x.shape), scale.to(SCALE_DTYPE)

    def load(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """Return what :meth:`store` stored, in fp32."""
        if self.scale is None:
            return self.decode(stored, None)
        spread_out = spread(scale.float(), stored.shape[-1] if stored.dim() else 1)
        return self.decode(as_bytes(stored), spread_out).view(stored.shape)


def as_bytes(stored: Tensor) -> Tensor:
    """The same memory, e4m3 as uint8."""
    return stored.view(torch.uint8) if stored.dtype is torch.float8_e4m3fn else stored


def in_blocks(x: Tensor) -> Tensor:
    """``[..., I]`` as ``[..., blocks, 64]``, filled up with zeros."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def spread(per_block: Tensor, columns: int) -> Tensor:
    """``[..., blocks]`` as ``[..., columns]``: each coordinate has what its block has."""
    return per_block.repeat_interleave(BLOCK, -1)[..., :columns]


def scale_shape(shape: torch.Size) -> torch.Size:
    """The shape of the scales of a weight of ``shape``."""
    *rows, columns = shape or (1,)
    return torch.Size((*rows, -(-columns // BLOCK)))


def scale_rows(weight: Tensor, rows: slice) -> slice:
    """Where the scales lie of ``rows`` of ``weight``; those of a vector are whole blocks, or reach to its end."""
    return slice(-(-rows.start // BLOCK), -(-rows.stop // BLOCK)) if weight.dim() == 1 else rows
