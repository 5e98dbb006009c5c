"""The launch of the Hopper kernel: what it can take, its descriptors and its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_config import CONFIGS, Config, choose_config, fit
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
    """Whether the kernel can multiply ``segments`` to an ``[O, I]`` gradient of ``shape``."""
    if any(map(is_lookup, segments)):
        return False
    segments = _with_tokens(segments)
    operands = [tensor for segment in segments for tensor in segment]
    return (
        len(segments) > 0
        and len({tensor.dtype for tensor in operands}) == 1
        and operands[0].dtype in (torch.bfloat16, torch.float16)
        and all(map(copyable, operands))
        # Merged segments are contiguous.
        and (len(segments) <= MAX_SEGMENTS or all(extent % 8 == 0 for extent in shape))
    )


def copyable(tensor: Tensor) -> bool:
    """Whether the copy engine takes a matrix as it lies: rows of unit stride, all 16-byte aligned."""
    size = tensor.element_size()
    return (
        tensor.dim() == 2
        and min(tensor.shape) > 0
        and max(tensor.shape) < 2**31
        and tensor.stride(1) == 1
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.stride(0) * size % 16 == 0
        and tensor.stride(0) * size < 2**40
        and tensor.data_ptr() % 16 == 0
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
    launch(slot, segments, accumulator, multiplier, config)(slot, segments, accumulator, multiplier)


def launch(
    slot: Slot,
    segments: Sequence[Segment],
    accumulator: Tensor | None,
    multiplier: Tensor | None,
    config: Config | None = None,
) -> Callable[..., None]:
    """As :func:`fused.launch`, for operands that :func:`supports` has taken."""
    used = _used(segments)
    if config is None:
        moved = slot.element_bytes + (0 if accumulator is None else accumulator.element_size())
        config = _chosen(slot.weight.shape, used, moved, slot.noise is not None)
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    added = None if accumulator is None else accumulator.dtype
    noise = None if slot.noise is None else slot.noise.words.data_ptr()
    key = (config, slot.rule, slot.norm_sq is None, len(used), used[0][0].dtype, scaled, added, noise)
    known = slot.memo.get(key)
    if known is None:
        known = slot.memo[key] = _Launch(slot, config, accumulator)
    if len(used) == len(segments):
        return known
    return lambda slot, segments, *others: known(slot, _used(segments), *others)


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
    written = (None if out is None else _describe(out, 64, config.sub_i), *[None] * (1 + MAX_STATES))
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
            changing = [dy for dy, _ in segments] + [x for _, x in segments]
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
        dys, xs = range(len(segments)), range(MAX_SEGMENTS, MAX_SEGMENTS + len(segments))
        changing = [*dys, *xs]
        describe = dict.fromkeys(dys, functools.partial(_describe, rows=self.config.block_t, columns=64))
        of_x = functools.partial(_describe, rows=self.config.block_t, columns=self.config.block_i)
        describe |= dict.fromkeys(xs, of_x)
        if accumulator is not None:
            changing.append(names.index("added"))
            describe[changing[-1]] = functools.partial(_describe, rows=64, columns=self.config.sub_i)
        if multiplier is not None:
            changing.append(names.index("multiplier"))
        if slot.rule.on_scratch:
            changing.append(names.index("written"))
            describe[changing[-1]] = functools.partial(_describe, rows=64, columns=self.config.sub_i)
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
        None if accumulator is None else _describe(accumulator, 64, config.sub_i),
        None if slot is None else slot.scalars,
        None if slot is None or slot.noise is None else slot.noise.words,
        multiplier,
        partials,
        config.group,
    )


def operand_descriptors(segments: Sequence[Segment], config: Config) -> tuple:
    """Every ``dY``, then every ``X``, each filled up with None."""
    absent = (None,) * (MAX_SEGMENTS - len(segments))
    dys = (_describe(dy, config.block_t, 64) for dy, _ in segments)
    xs = (_describe(x, config.block_t, config.block_i) for _, x in segments)
    return (*dys, *absent, *xs, *absent)


def written_descriptors(slot: Slot, config: Config) -> tuple:
    """Weight, master and states, the absent ones as None."""
    states = [_describe(state, 64, config.sub_i) for state in slot.states]
    return (
        _describe(slot.weight, 64, config.sub_i),
        None if slot.master is None else _describe(slot.master, 64, config.sub_i),
        *states,
        *[None] * (MAX_STATES - len(states)),
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
        "OPERAND": TL_DTYPES[segments[0][0].dtype],
        "TILE": (config.block_o, config.block_i, config.sub_i, config.slots),
        "BLOCK_T": config.block_t,
        "STAGES": config.stages,
        "SLOT_BYTES": 64 * config.sub_i * loaded,
        "PINGPONG": config.pingpong,
        "CHUNKS": config.chunks,
        "REGISTERS": REGISTERS if len(segments) <= 2 else REGISTERS_MANY_SEGMENTS,
        "num_warps": 4,
        "maxnreg": MAXNREG,
    }


def _rule(slot: Slot) -> Named:
    return Named((compiled_update(slot.rule), slot.rule.n_scalars, slot.rule.on_scratch))


def _used(segments: Sequence[Segment]) -> list[Segment]:
    """Those with tokens, no more than the kernel has room for."""
    return merge_segments(_with_tokens(segments))


def _with_tokens(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment[0].shape[0]]


def _held(slot: Slot, accumulator: Tensor | None) -> list[Tensor]:
    """What a slot of shared memory holds a sub-tile of, the weight first."""
    held = [tensor for _, tensor in slot.tensors()]
    return held if accumulator is None else [*held, accumulator]


def _chosen(shape: Sequence[int], segments: Sequence[Segment], element_bytes: int, stochastic: bool = False) -> Config:
    tokens = sum(dy.shape[0] for dy, _ in segments)
    return CONFIGS[choose_config(*shape, tokens, element_bytes, stochastic)]


def fitted(config: Config, held: Sequence[Tensor]) -> Config | None:
    """``config`` as :func:`fit` makes it for what a slot of shared memory holds."""
    sizes = [tensor.element_size() for tensor in held]
    return fit(config, max(sizes), sum(sizes))


def fitted_to(config: Config, slot: Slot, accumulator: Tensor | None = None) -> Config | None:
    """``config`` as :func:`fit` makes it for the storage of ``slot``."""
    return fitted(config, _held(slot, accumulator))


def _partials(config: Config, shape: Sequence[int], device: torch.device) -> Tensor:
    """One sum of squares of each warp's part of a tile."""
    count = config.tiles(*shape) * (4 if config.pingpong else 8)
    return torch.empty(count, dtype=torch.float32, device=device)


def _grid(config: Config, shape: Sequence[int], device: torch.device) -> tuple[int, int, int]:
    return (min(config.tiles(*shape), _processors(device)), 1, 1)


def _describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    # Its own checks are those of copyable(), once more at every launch.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=tensor,
        shape=list(tensor.shape),
        strides=list(tensor.stride()),
        block_shape=[rows, columns],
        layout=_shared_layout(rows, columns, tensor.dtype),
        padding="zero",
    )
    return descriptor


@functools.cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], TL_DTYPES[dtype])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
