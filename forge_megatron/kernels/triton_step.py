"""The multi-tensor step: many weights of any shapes, one launch for all that are stored alike."""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.code import as_bytes
from .slot import Slot, layout
from .step_tables import BLOCK, device_table, row_of
from .triton_epilogue import by_blocks, step_coordinates
from .triton_language import TL_DTYPES, compiled_codes, compiled_update, load_scalars
from .triton_launch import launched
from .triton_noise import block_bits, flat_bits

NUM_WARPS = 8

#: Programs whose partial norms are summed side by side.
LANES = 1024

# Compiled functions are slow to hash: once a weight, not once a step.
_kinds: dict[tuple, tuple] = {}

#: Launches that are remembered: data-parallel ranks have one for each bucket.
MAX_LAUNCHES = 1024
_launches: dict[tuple, tuple] = {}


@triton.jit
def pointer(table, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def multi_tensor_step_kernel(
    table,
    owners,
    multiplier,
    partials,
    UPDATE: tl.constexpr,
    CODES: tl.constexpr,
    ON_SCRATCH: tl.constexpr,
    N_SCALARS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASTER: tl.constexpr,
    WEIGHT_SCALED: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATES: tl.constexpr,
    SCALED: tl.constexpr,
    SCALED_STATES: tl.constexpr,
    NOISY: tl.constexpr,
    GROUPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * COLUMNS
    first = tl.load(row + 1)
    size = tl.load(row + 2)
    if ALIGNED and not SCALED:
        size = tl.multiple_of(size, 16)
    h = load_scalars(pointer(row, 4, tl.float32, False), N_SCALARS)
    weight = pointer(row, 5, WEIGHT, ALIGNED)
    grad = pointer(row, 6, GRAD, ALIGNED)
    bits = None
    scales = ()
    has_block = None
    weight_scale = None
    if SCALED:
        own = (program - first).to(tl.int64)
        columns = tl.load(row + 8)
        if ALIGNED:
            columns = tl.multiple_of(columns, 16)
        offset, inside, block, has_block, begin = by_blocks(own, size, columns, BLOCK, WHOLE)
        # Addresses end with those of the states' scales, or of the weight's, or of both.
        if WEIGHT_SCALED:
            weight_scale = pointer(row, COLUMNS - 1, tl.bfloat16, False) + block
        for index in tl.static_range(SCALED_STATES):
            scale = pointer(row, 9 + len(STATES) + MASTER + index, tl.bfloat16, False)
            scales = scales + (scale + block,)
        if NOISY:
            bits = block_bits(pointer(row, 7, tl.int64, False), begin, BLOCK // 64, GROUPED)
    else:
        offset = (program - first) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < size
        if NOISY:
            own = (program - first).to(tl.int64) * BLOCK
            bits = flat_bits(pointer(row, 7, tl.int64, False), own, BLOCK, GROUPED)

    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    if partials is not None:
        tl.store(partials + program, tl.sum(g * g))
    if multiplier is not None:
        g *= tl.load(multiplier)
    states = ()
    for index in tl.static_range(len(STATES)):
        states = states + (pointer(row, 9 + index, STATES[index], ALIGNED) + offset,)
    master = None
    if MASTER:
        master = pointer(row, 9 + len(STATES), tl.float32, ALIGNED) + offset
    step_coordinates(
        g,
        inside,
        weight + offset,
        weight_scale,
        master,
        states,
        scales,
        has_block,
        h,
        bits,
        UPDATE,
        CODES,
        False,
        ON_SCRATCH,
    )


@triton.jit
def sum_partials_kernel(table, partials, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    row = table + tl.program_id(0) * COLUMNS
    blocks = tl.load(row)
    first = tl.load(row + 1)
    norm_sq = tl.load(row + 3)
    if norm_sq != 0:
        total = tl.zeros((LANES,), tl.float64)
        for start in range(0, blocks, LANES):
            lane = start + tl.arange(0, LANES)
            part = tl.load(partials + first + lane, mask=lane < blocks, other=0.0)
            total += part.to(tl.float64)
        tl.store(norm_sq.to(tl.pointer_type(tl.float32)), tl.sum(total).to(tl.float32))


def step(slots: Sequence[Slot], grads: Sequence[Tensor], multiplier) -> None:
    """Launch the step of all slots, on operands that the caller checked."""
    groups: dict[int, tuple[tuple, list]] = {}
    staged = []
    for slot, grad in zip(slots, grads, strict=True):
        if slot.weight.numel() == 0:
            if slot.norm_sq is not None:
                slot.norm_sq.data.zero_()
            continue
        # Whatever else the launch reads of a slot stays as it is for as long as its memo.
        met = layout(grad), slot.rule, slot.norm_sq is None
        known = slot.memo.get("row")
        if known is not None and known[0] == met:
            _, key, row = known
            dense, formed = slot, grad
        else:
            dense, formed = _densify(slot, grad)
            key, row = _kind(dense, formed), row_of(dense, formed)
            if dense is not slot:
                staged.append((slot, dense))
            elif formed is grad:
                slot.memo["row"] = met, key, row
        groups.setdefault(id(key), (key, []))[1].append((dense, formed, row))
    for key, members in groups.values():
        _launch(key, *zip(*members, strict=True), multiplier)
    for slot, dense in staged:
        for (_, target), (_, source) in zip(slot.tensors(), dense.tensors(), strict=True):
            target.data.copy_(source)


def _kind(slot: Slot, grad: Tensor) -> tuple:
    """What all weights of one launch have in common, as :func:`_first` takes it: one tuple for all that are equal."""
    tensors = [grad, *(tensor for _, tensor in slot.tensors())]
    row = grad.shape[-1] if slot.is_scaled and grad.dim() else grad.numel()
    kind = (
        slot.rule,
        compiled_codes(slot),
        tuple(TL_DTYPES[as_bytes(state).dtype] for state in slot.states),
        slot.is_scaled,
        as_bytes(slot.weight).dtype,
        grad.dtype,
        slot.master is not None,
        slot.weight_scale is not None,
        None if slot.noise is None else slot.noise.is_grouped,
        all(tensor.data_ptr() % 16 == 0 for tensor in tensors) and row % 16 == 0,
        slot.is_scaled and row % 64 == 0,
        len(slot.scales),
    )
    return _kinds.setdefault(kind, kind)


def _launch(kind: tuple, slots, grads, rows, multiplier) -> None:
    device = slots[0].weight.device
    table, owners = device_table(rows, grads)
    partials = None
    if any(slot.norm_sq is not None for slot in slots):
        partials = torch.empty(owners.shape, dtype=torch.float32, device=device)
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    met = id(kind), device, owners.numel(), len(slots), partials is None, scaled
    again, add_up = _launches.get(met, (None, None))
    changing = {"table": table, "owners": owners, "multiplier": multiplier, "partials": partials}
    changing = {name: tensor for name, tensor in changing.items() if tensor is not None}
    if again is None:
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        _launches[met] = _first(kind, len(slots), table, owners, multiplier, partials, list(changing))
        return
    again(*changing.values())
    if add_up is not None:
        add_up(table, partials)


def _first(kind: tuple, count: int, table, owners, multiplier, partials, changing: list[str]) -> tuple:
    """Launches both kernels, and returns what launches each again; None: nothing does, or there are no norms."""
    rule, codes, states, scaled, weight_dtype, grad_dtype, master, weight_scaled, grouped, aligned, whole, scales = kind
    arguments = {
        "table": table,
        "owners": owners,
        "multiplier": multiplier,
        "partials": partials,
        "UPDATE": compiled_update(rule),
        "CODES": codes,
        "ON_SCRATCH": rule.on_scratch,
        "N_SCALARS": rule.n_scalars,
        "COLUMNS": table.shape[1],
        "MASTER": master,
        "WEIGHT_SCALED": weight_scaled,
        "WEIGHT": TL_DTYPES[weight_dtype],
        "GRAD": TL_DTYPES[grad_dtype],
        "STATES": states,
        "SCALED": scaled,
        "SCALED_STATES": scales,
        "NOISY": grouped is not None,
        "GROUPED": bool(grouped),
        "ALIGNED": aligned,
        "WHOLE": whole,
        "BLOCK": BLOCK,
        "num_warps": NUM_WARPS,
    }
    step = launched(multi_tensor_step_kernel, (owners.numel(), 1), (), arguments, changing)
    if partials is None:
        return step, None
    norms = {"table": table, "partials": partials, "COLUMNS": table.shape[1], "LANES": LANES}
    return step, launched(sum_partials_kernel, (count, 1), (), norms, ["table", "partials"])


def _densify(slot: Slot, grad: Tensor) -> tuple[Slot, Tensor]:
    """Return them such that equal offsets are equal coordinates, copied where they were not."""
    layout = slot.weight.stride()
    if not slot.weight.is_contiguous():
        # empty_like keeps the strides of a tensor exactly where it has no holes and no overlap.
        layout = torch.empty_like(slot.weight, device="meta").stride()
    # Random bits and blocks are counted along the rows.
    by_rows = (slot.noise is not None or slot.is_scaled) and not slot.weight.is_contiguous()
    if by_rows or any(tensor.stride() != layout for _, tensor in slot.tensors()):
        slot = replace(
            slot,
            weight=slot.weight.contiguous(),
            states=tuple(state.contiguous() for state in slot.states),
            master=None if slot.master is None else slot.master.contiguous(),
        )
        layout = slot.weight.stride()
    if grad.stride() != layout:
        grad = torch.empty_like(slot.weight, dtype=grad.dtype).copy_(grad)
    return slot, grad
