"""What the three kernels of a weight gradient are launched with alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grouped import merge_grouped
from .lookups import Lookups, is_lookup
from .merge import MAX_SEGMENTS, merge_segments
from .prepared import prepare
from .tiles import Tile, choose_tile, in_blocks

#: Strides from here on need 64-bit offsets inside a tile: a tile spans at most 384 strides.
WIDE_STRIDE = 1 << 22


class Launch:
    """Operands, grid and options of one launch.

    Args:
        rows, columns: of the gradient.
        written: the other tensors of that shape which the kernel addresses.
        noisy: it makes random bits besides.
        scaled: states are stored in blocks.
        experts: of a grouped weight, of which every other operand is the first expert's part; None: it is a matrix.
        tile: None: as :func:`choose_tile` has it.
    """

    def __init__(
        self,
        segments,
        accumulator,
        rows: int,
        columns: int,
        written=(),
        *,
        noisy: bool = False,
        scaled: bool = False,
        experts: int | None = None,
        tile: Tile | None = None,
    ):
        bounds = None
        if experts is not None:
            segments, bounds = merge_grouped(segments)
        lookups = Lookups.of([segment for segment in segments if is_lookup(segment)])
        segments = merge_segments([s for s in segments if s[0].shape[0] and not is_lookup(s)])
        dys, xs = zip(*segments, strict=True) if segments else ((), ())
        tensors = [*dys, *xs, *written, *(() if accumulator is None else (accumulator,))]
        aligned = rows % 16 == columns % 16 == 0 and all(map(_is_aligned, tensors))
        fp32 = any(torch.float32 in (dy.dtype, x.dtype) or dy.dtype != x.dtype for dy, x in segments)
        wide = any(stride >= WIDE_STRIDE for tensor in tensors for stride in tensor.stride())
        precise = lookups is not None and lookups.values.dtype is torch.float32
        if tile is None:
            tile = choose_tile(rows, columns, fp32=fp32 or precise, aligned=aligned, product=bool(segments))
            tile = in_blocks(tile, aligned=aligned) if scaled else tile
        self.operands = (
            dys,
            xs,
            tuple((*dy.stride(), *x.stride()) for dy, x in segments),
            *(dy.shape[0] for dy in dys),
            *(0 for _ in range(MAX_SEGMENTS - len(dys))),
            bounds,
            *_lookup_operands(lookups, rows, tile.block_o),
            accumulator,
            None if accumulator is None else accumulator.stride(),
        )
        self.parts = tile.parts
        # More operands take more registers than two programs on one processor leave each other.
        few = len(segments) == 1 and lookups is None and accumulator is None and not noisy
        self.maxnreg = tile.maxnreg if few and all(t.element_size() <= 2 for t in written) else None
        tiles = triton.cdiv(rows, tile.block_o) * triton.cdiv(columns, tile.block_i)
        self.grid = (tiles, 1 if experts is None else experts)
        self.options = {
            "BLOCK_O": tile.block_o,
            "BLOCK_I": tile.block_i,
            "BLOCK_T": tile.block_t,
            "GROUP": tile.group,
            "OFFSET": tl.int64 if wide else tl.int32,
            "PRECISION": "tf32" if fp32 and _tf32_allowed() else "ieee",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def partials(self, device: torch.device) -> Tensor:
        """One fp32 sum of squares a tile; their sum has a fixed order, so replicas agree."""
        return torch.empty(self.grid[0] * self.grid[1], dtype=torch.float32, device=device)


def launched(kernel, grid: tuple[int, int], positional: tuple, constants: dict, changing: Sequence[str]):
    """Launch ``kernel``, and return what launches it again.

    Args:
        constants: its other arguments, by name, and options.
        changing: the arguments, tensors or tuples of some, that each later launch has anew and is called with.

    Returns:
        As :func:`prepare` does; None in the interpreter, which has compiled nothing.
    """
    compiled = kernel[grid](*positional, **constants)
    if compiled is None:
        return None
    names = kernel.arg_names
    arguments = [*positional, *(constants[name] for name in names[len(positional) :])]
    return prepare(compiled, (*grid, 1), arguments, list(map(names.index, changing)))


def _lookup_operands(lookups: Lookups | None, rows: int, block: int) -> tuple:
    if lookups is None:
        return None, None
    starts = lookups.starts(rows, block)
    return (lookups.ids, lookups.order, lookups.values, starts), lookups.values.stride()


def _is_aligned(tensor: Tensor) -> bool:
    # 16 elements, not 16 bytes: what Triton specialises integers on.
    strides_fit = all(stride == 1 or stride % 16 == 0 for stride in tensor.stride())
    return strides_fit and tensor.data_ptr() % 16 == 0


def _tf32_allowed() -> bool:
    # The older allow_tf32 raises when it is read after this one was set.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
