"""The launch of the Hopper kernel: what it can take, its descriptors and its configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .grouped import merge_experts
from .hopper_config import CONFIGS, Config, choose_config, fit
from .hopper_descriptors import (
    copyable,
    experts_of,
    is_of_experts,
    of_dy,
    of_slot,
    of_x,
    operand_descriptors,
    tensors_of,
)
from .hopper_kernel import hopper_wgrad_step_kernel
from .lookups import is_lookup
from .merge import MAX_SEGMENTS, merge_segments
from .norms import add_up
from .prepared import prepare
from .slot import Segment, Slot
from .triton_language import TL_DTYPES, Named, compiled_update

#: What the kernel's arguments have room for.
MAX_STATES = 3

#: Registers a thread. Three warpgroups start with 168 each; the consumers take what the copying
#: warps give up. Many segments need more descriptors at hand in the producer.
MAXNREG = 168
REGISTERS = (240, 24)
REGISTERS_MANY_SEGMENTS = (232, 40)


def supports(slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None = None) -> bool:
    """Whether the kernel can step ``slot`` from ``segments``, by dtypes, strides and addresses.

    Wants bf16 or fp16 operands of one dtype, some tokens, at most ``MAX_STATES`` states that are stored as they
    are, a weight that is, random bits that are grouped as the whole weight's are, and tensors that the copy engine
    takes (:func:`copyable`).

    Raises:
        TypeError: a state whose dtype is no format's.
    """
    slot.state_format()
    return (
        takes_operands(segments, slot.weight.shape)
        and len(slot.states) <= MAX_STATES
        and not slot.is_scaled
        and slot.weight_scale is None
        and (slot.noise is None or slot.noise.row_is_grouped)
        and all(map(copyable, _held(slot, accumulator)))
        and all(fitted_to(config, slot, accumulator) for config in CONFIGS.values())
    )


def takes_operands(segments: Sequence[Segment], shape: Sequence[int]) -> bool:
    """Whether the kernel can multiply ``segments`` to an ``[O, I]``, or ``[E, O, I]``, gradient of ``shape``."""
    if any(map(is_lookup, segments)):
        return False
    segments = _with_tokens(segments)
    if not segments:
        return False
    operands = tensors_of(segments)[: 2 * len(segments)]
    return (
        len({tensor.dtype for tensor in operands}) == 1
        and operands[0].dtype in (torch.bfloat16, torch.float16)
        and all(map(copyable, operands))
        # Merged segments are contiguous.
        and (len(segments) <= MAX_SEGMENTS or all(extent % 8 == 0 for extent in shape[-2:]))
    )


def wgrad_step(
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    config: Config | None = None,
) -> None:
    """Launch the step of one weight that :func:`supports` has taken.

    ``slot.norm_sq`` receives the sum over the warps' parts of tiles of the squares of G, in one order.

    Args:
        config: instead of the table's, for measurements.
    """
    used = _used(segments)
    _bound(slot, used, accumulator, multiplier, config)(slot, used, accumulator, multiplier)


def launch(
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    config: Config | None = None,
) -> Callable[..., None]:
    """As :func:`fused.launch`, for operands that :func:`supports` has taken."""
    used = _used(segments)
    known = _bound(slot, used, accumulator, multiplier, config)
    if len(used) == len(segments):
        return known
    return lambda slot, segments, *others: known(slot, _used(segments), *others)


def _bound(
    slot: Slot, used: list[Segment], accumulator: Tensor | None, multiplier: Tensor | None, config: Config | None
) -> _Launch:
    if config is None:
        moved = slot.element_bytes + (0 if accumulator is None else accumulator.element_size())
        config = _chosen(slot.weight.shape, used, moved, slot.noise is not None)
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    added = None if accumulator is None else accumulator.dtype
    noise = None if slot.noise is None else slot.noise.words.data_ptr()
    bounds = tuple(dy.bounds.data_ptr() % 16 for dy, _ in used) if is_of_experts(used) else None
    key = (config, slot.rule, slot.norm_sq is None, len(used), used[0][1].dtype, scaled, added, noise, bounds)
    known = slot.memo.get(key)
    if known is None:
        known = slot.memo[key] = _Launch(slot, config, accumulator)
    return known


def wgrad_write(segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None) -> None:
    """Write the gradient to ``out``, fp32 or bf16, which may be ``accumulator``; :func:`takes_write` has taken it."""
    segments = _used(segments)
    held = [out] if accumulator is None or accumulator is out else [out, accumulator]
    config = _chosen(out.shape, segments, sum(tensor.element_size() for tensor in held))
    positional, keywords = gradient_arguments(segments, config, held, accumulator is out, None)
    hopper_wgrad_step_kernel[_grid(config, out.shape, out.device)](*positional, **keywords)


def takes_write(segments: Sequence[Segment], out: Tensor, accumulator: Tensor | None) -> bool:
    """Whether :func:`wgrad_write` can take these operands."""
    held = [out] if accumulator is None else [out, accumulator]
    return takes_operands(segments, out.shape) and all(map(copyable, held))


def wgrad_norm_sq(segments: Sequence[Segment], out: Tensor, shape: Sequence[int]) -> None:
    """Write the sum of squares of the gradient, which :func:`takes_operands` has taken, to ``out``."""
    segments = _used(segments)
    config = _chosen(shape, segments, 0)
    partials = _partials(config, shape, out.device)
    positional, keywords = gradient_arguments(segments, config, [], False, partials)
    hopper_wgrad_step_kernel[_grid(config, shape, out.device)](*positional, **keywords)
    add_up(out, partials, None)


def gradient_arguments(
    segments: Sequence[Segment], config: Config, held: Sequence[Tensor], add: bool, partials: Tensor | None
) -> tuple[tuple, dict]:
    """The kernel's positional and keyword arguments where nothing is stepped.

    Args:
        held: what is written, and what is added to it from elsewhere; neither where only the norm is wanted.
        add: the gradient is added to what it is written over.
    """
    config = fitted(config, held) if held else replace(config, slots=2)
    out, added = (*held, None, None)[:2]
    written = (None if out is None else of_slot(config)(out), *[None] * (1 + MAX_STATES))
    positional = _positional(segments, config, written, added, partials)
    return positional, constants(None, segments, config, held, add=add)


class _Launch:
    """The kernel, bound to one weight and one kind of operands; they, and a scratch, change from call to call."""

    def __init__(self, slot: Slot, config: Config, accumulator: Tensor | None):
        self.config = fitted_to(config, slot, accumulator)
        self.partials = None
        if slot.norm_sq is not None:
            self.partials = _partials(self.config, slot.weight.shape, slot.weight.device)
        self.grid = _grid(self.config, slot.weight.shape, slot.weight.device)
        self.prepared = None

    def __call__(
        self, slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None
    ) -> None:
        if self.prepared is None:
            self._first(slot, segments, accumulator, multiplier)
        else:
            changing = tensors_of(segments)
            changing += [each for each in (accumulator, multiplier) if each is not None]
            changing += [slot.weight] if slot.rule.on_scratch else []
            self.prepared(*changing)
        if self.partials is not None:
            add_up(slot.norm_sq, self.partials, slot.late_norms)

    def _first(self, slot: Slot, segments, accumulator: Tensor | None, multiplier: Tensor | None) -> None:
        positional, keywords = arguments(slot, segments, accumulator, multiplier, self.partials, self.config)
        compiled = hopper_wgrad_step_kernel[self.grid](*positional, **keywords)
        names = hopper_wgrad_step_kernel.arg_names
        constant = [keywords[name] for name in names[len(positional) :]]
        dys, xs, bounds = (range(first, first + len(segments)) for first in range(0, 3 * MAX_SEGMENTS, MAX_SEGMENTS))
        changing = [*dys, *xs, *(bounds if is_of_experts(segments) else ())]
        describe = dict.fromkeys(dys, of_dy(segments, self.config))
        describe |= dict.fromkeys(xs, of_x(segments, self.config))
        if accumulator is not None:
            changing.append(names.index("added"))
            describe[changing[-1]] = of_slot(self.config)
        if multiplier is not None:
            changing.append(names.index("multiplier"))
        if slot.rule.on_scratch:
            changing.append(names.index("written"))
            describe[changing[-1]] = of_slot(self.config)
        self.prepared = prepare(compiled, self.grid, [*positional, *constant], changing, describe)


def arguments(
    slot: Slot, segments, accumulator: Tensor | None, multiplier: Tensor | None, partials: Tensor | None, config: Config
) -> tuple[tuple, dict]:
    """The kernel's positional and keyword arguments, for a fitted ``config``."""
    written = written_descriptors(slot, config)
    positional = _positional(segments, config, written, accumulator, partials, slot, multiplier)
    return positional, constants(slot, segments, config, _held(slot, accumulator))


def _positional(
    segments,
    config: Config,
    written: tuple,
    accumulator: Tensor | None,
    partials: Tensor | None,
    slot: Slot | None = None,
    multiplier: Tensor | None = None,
) -> tuple:
    """The kernel's positional arguments, with the descriptors of what it writes."""
    return (
        *operand_descriptors(segments, config),
        *written,
        None if accumulator is None else of_slot(config)(accumulator),
        None if slot is None else slot.scalars,
        None if slot is None or slot.noise is None else slot.noise.words,
        multiplier,
        partials,
        config.group,
        experts_of(segments),
    )


def written_descriptors(slot: Slot, config: Config) -> tuple:
    """Weight, master and states, the absent ones as None."""
    describe = of_slot(config)
    states = map(describe, slot.states)
    return (
        describe(slot.weight),
        None if slot.master is None else describe(slot.master),
        *states,
        *[None] * (MAX_STATES - len(slot.states)),
    )


def constants(
    slot: Slot | None, segments: Sequence[Segment], config: Config, held: Sequence[Tensor], *, add: bool = False
) -> dict:
    """The kernel's compile-time arguments and launch options.

    Args:
        slot: None: the gradient is written, or its norm taken.
        held: what a slot of shared memory holds a sub-tile of.
        add: the gradient is added to what it is written over.
    """
    # What is written and not read: a gradient, the weight of a master, a scratch.
    unread = not add if slot is None else slot.master is not None or slot.rule.on_scratch
    first = 1 if unread else 0
    loaded = sum(tensor.element_size() for tensor in held[first:])
    return {
        "RULE": None if slot is None else _rule(slot),
        "ADD": add,
        "OPERAND": TL_DTYPES[segments[0][1].dtype],
        "TILE": (config.block_o, config.block_i, config.sub_i, config.slots),
        "BLOCK_T": config.block_t,
        "STAGES": config.stages,
        "SLOT_BYTES": 64 * config.sub_i * loaded,
        "PINGPONG": config.pingpong,
        "CHUNKS": config.chunks,
        "REGISTERS": REGISTERS if len(segments) <= 2 and not is_of_experts(segments) else REGISTERS_MANY_SEGMENTS,
        "num_warps": 4,
        "maxnreg": MAXNREG,
    }


def _rule(slot: Slot) -> Named:
    return Named((compiled_update(slot.rule), slot.rule.n_scalars, slot.rule.on_scratch))


def _used(segments: Sequence[Segment]) -> list[Segment]:
    """Those with tokens, no more than the kernel has room for."""
    segments = _with_tokens(segments)
    return merge_experts(segments) if is_of_experts(segments) else merge_segments(segments)


def _with_tokens(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment[1].shape[0]]


def _held(slot: Slot, accumulator: Tensor | None) -> list[Tensor]:
    """What a slot of shared memory holds a sub-tile of, the weight first."""
    held = [tensor for _, tensor in slot.tensors()]
    return held if accumulator is None else [*held, accumulator]


def _chosen(shape: Sequence[int], segments: Sequence[Segment], element_bytes: int, stochastic: bool = False) -> Config:
    tokens = sum(x.shape[0] for _, x in segments)
    *experts, rows, columns = shape
    return CONFIGS[choose_config(rows, columns, tokens, element_bytes, stochastic, *experts)]


def fitted(config: Config, held: Sequence[Tensor]) -> Config | None:
    """``config`` as :func:`fit` makes it for what a slot of shared memory holds."""
    sizes = [tensor.element_size() for tensor in held]
    return fit(config, max(sizes), sum(sizes))


def fitted_to(config: Config, slot: Slot, accumulator: Tensor | None = None) -> Config | None:
    """``config`` as :func:`fit` makes it for the storage of ``slot``."""
    return fitted(config, _held(slot, accumulator))


def _partials(config: Config, shape: Sequence[int], device: torch.device) -> Tensor:
    """One sum of squares of each warp's part of a tile."""
    count = _tiles(config, shape) * (4 if config.pingpong else 8)
    return torch.empty(count, dtype=torch.float32, device=device)


def _grid(config: Config, shape: Sequence[int], device: torch.device) -> tuple[int, int, int]:
    return (min(_tiles(config, shape), _processors(device)), 1, 1)


def _tiles(config: Config, shape: Sequence[int]) -> int:
    return config.tiles(*shape[-2:]) * math.prod(shape[:-2])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
