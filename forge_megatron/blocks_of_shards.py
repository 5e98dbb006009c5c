"""States with a scale for each 64 coordinates of a row, of weights that are DTensors.

A rank has whole blocks and their scales, so that codes and scales are those of the whole weight on any number of ranks.
A vector is cut at any coordinate: its states, a thousandth of a matrix's, stay fp32 wherever it is sharded.
"""

from __future__ import annotations

from torch import Tensor

from forge_megatron.formats import StateFormat, state_format
from forge_megatron.formats.code import BLOCK, Code, scale_shape
from forge_megatron.kernels import is_sharded, local, placed_as, shard_like


def format_for(p: Tensor, wanted: StateFormat, label: str) -> StateFormat:
    """The format of the states of ``p``.

    Raises:
        NotImplementedError: ranks have parts of a matrix's rows.
    """
    if not (wanted.is_scaled and is_sharded(p)):
        return wanted
    if p.dim() < 2:
        return state_format("fp32")
    if _cuts_blocks(p):
        raise NotImplementedError(
            f"{label}: state_format={wanted.name!r} of a weight {list(p.shape)} placed as {p.placements}, whose rows "
            "are cut between ranks within a block of 64 coordinates; cut them at multiples of 64 or shard another "
            "dimension, or use 'bf16' or 'fp32'"
        )
    return wanted


def _cuts_blocks(p: Tensor) -> bool:
    # torch's _StridedShard, of fully_shard over tensor-parallel ranks, says of itself that it is no shard.
    last = p.dim() - 1
    cuts = [d for d, placement in enumerate(p.placements) if getattr(placement, "dim", None) == last]
    shares = [-(-p.shape[last] // p.device_mesh.size(d)) for d in cuts]
    return len(cuts) > 1 or any(share % BLOCK for share in shares)


def allocate(fmt: StateFormat, name: str, p: Tensor, value: float, *, nonnegative: bool) -> dict[str, Tensor]:
    """As :meth:`~forge_megatron.formats.StateFormat.allocate`; of a DTensor, the same of it, placed as it is."""
    if not (fmt.is_scaled and is_sharded(p)):
        return fmt.allocate(name, p, value, nonnegative=nonnegative)
    parts = fmt.allocate(name, local(p), value, nonnegative=nonnegative)
    shapes = {name: p.shape}
    return {key: placed_as(p, part, shapes.get(key, scale_shape(p.shape))) for key, part in parts.items()}


def decode(code: Code, stored: Tensor, scale: Tensor | None) -> Tensor:
    """In fp32, placed as ``stored``."""
    if not is_sharded(stored):
        return code.load(stored, scale)
    return placed_as(stored, code.load(local(stored), None if scale is None else local(scale)), stored.shape)


def encode(code: Code, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of an fp32 tensor, placed as ``own``; one that every rank has whole is cut."""
    if not is_sharded(own):
        return code.store(x)
    codes, scale = code.store(local(x if is_sharded(x) else shard_like(x, own)))
    return placed_as(own, codes, own.shape), None if scale is None else placed_as(own, scale, scale_shape(own.shape))
