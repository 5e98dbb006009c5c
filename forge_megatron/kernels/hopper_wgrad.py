"""The launch of the Hopper kernel: what it can take, its descriptors and its configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..formats import state_format_of
from .hopper_config import CONFIGS, Config, choose_config, fit
from .hopper_kernel import hopper_wgrad_step_kernel
from .merge import MAX_SEGMENTS, merge_segments
from .norms import add_up
from .prepared import prepare
from .slot import Segment, Slot
from .triton_language import TL_DTYPES, compiled_update

#: What the kernel's arguments have room for.
MAX_STATES = 3

#: State formats that are a rounding and nothing else.
STATE_FORMATS = ("fp32", "bf16")

#: Registers a thread. Three warpgroups start with 168 each; the consumers take what the copying
#: warps give up. Many segments need more descriptors at hand in the producer.
MAXNREG = 168
REGISTERS = (240, 24)
REGISTERS_MANY_SEGMENTS = (232, 40)


def supports(slot: Slot, segments: Sequence[Segment]) -> bool:
    """Whether the kernel can step ``slot`` from ``segments``, by dtypes, strides and addresses.

    Wants bf16 or fp16 operands of one dtype, some tokens, at most ``MAX_STATES`` states that are
    stored as they are, a weight that is rounded to nearest, and tensors that the copy engine takes
    (:func:`copyable`).

    Raises:
        TypeError: a state whose dtype is no format's.
    """
    segments = _with_tokens(segments)
    operands = [tensor for segment in segments for tensor in segment]
    return (
        len(segments) > 0
        and len(slot.states) <= MAX_STATES
        and slot.noise is None
        and all(state_format_of(state).name in STATE_FORMATS for state in slot.states)
        and len({tensor.dtype for tensor in operands}) == 1
        and operands[0].dtype in (torch.bfloat16, torch.float16)
        and all(map(copyable, operands))
        and all(copyable(tensor) for _, tensor in slot.tensors())
        # Merged segments are contiguous.
        and (len(segments) <= MAX_SEGMENTS or all(extent % 8 == 0 for extent in slot.weight.shape))
        and all(fitted(config, slot) for config in CONFIGS.values())
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
    slot: Slot, segments: Sequence[Segment], multiplier: Tensor | None, config: Config | None = None
) -> None:
    """Launch the step of one weight that :func:`supports` has taken.

    ``slot.norm_sq`` receives the sum over the consumers' tiles of the squares of G, in one order.

    Args:
        config: instead of the table's, for measurements.
    """
    launch(slot, segments, multiplier, config)(slot, segments, None, multiplier)


def launch(
    slot: Slot, segments: Sequence[Segment], multiplier: Tensor | None, config: Config | None = None
) -> Callable[..., None]:
    """As :func:`fused.launch`, for operands that :func:`supports` has taken."""
    used = _used(segments)
    if config is None:
        tokens = sum(dy.shape[0] for dy, _ in used)
        config = CONFIGS[choose_config(*slot.weight.shape, tokens, slot.element_bytes)]
    scaled = None if multiplier is None else multiplier.data_ptr() % 16
    key = (config, slot.rule, slot.norm_sq is None, len(used), used[0][0].dtype, scaled)
    known = slot.memo.get(key)
    if known is None:
        known = slot.memo[key] = _Launch(slot, config)
    if len(used) == len(segments):
        return known
    return lambda slot, segments, _, multiplier: known(slot, _used(segments), None, multiplier)


class _Launch:
    """The kernel, bound to one weight and one kind of operands, which alone change from call to call."""

    def __init__(self, slot: Slot, config: Config):
        self.config = fitted(config, slot)
        tiles = self.config.tiles(*slot.weight.shape)
        self.partials = None
        if slot.norm_sq is not None:
            count = tiles * (1 if config.pingpong else 2)
            self.partials = torch.empty(count, dtype=torch.float32, device=slot.weight.device)
        self.grid = (min(tiles, _processors(slot.weight.device)), 1, 1)
        self.prepared = None

    def __call__(self, slot: Slot, segments: Sequence[Segment], _, multiplier: Tensor | None) -> None:
        if self.prepared is None:
            self._first(slot, segments, multiplier)
        else:
            changing = [dy for dy, _ in segments] + [x for _, x in segments]
            self.prepared(*changing, *(() if multiplier is None else (multiplier,)))
        if self.partials is not None:
            add_up(slot.norm_sq, self.partials, slot.late_norms)

    def _first(self, slot: Slot, segments: Sequence[Segment], multiplier: Tensor | None) -> None:
        positional, keywords = arguments(slot, segments, multiplier, self.partials, self.config)
        compiled = hopper_wgrad_step_kernel[self.grid](*positional, **keywords)
        names = hopper_wgrad_step_kernel.arg_names
        constant = [keywords[name] for name in names[len(positional) :]]
        dys, xs = range(len(segments)), range(MAX_SEGMENTS, MAX_SEGMENTS + len(segments))
        changing = [*dys, *xs] + ([] if multiplier is None else [names.index("multiplier")])
        describe = dict.fromkeys(dys, functools.partial(_describe, rows=self.config.block_t, columns=64))
        of_x = functools.partial(_describe, rows=self.config.block_t, columns=self.config.block_i)
        describe |= dict.fromkeys(xs, of_x)
        self.prepared = prepare(compiled, self.grid, [*positional, *constant], changing, describe)


def arguments(slot: Slot, segments, multiplier, partials, config: Config) -> tuple[tuple, dict]:
    """The kernel's positional and keyword arguments, for a fitted ``config``."""
    operands, written = operand_descriptors(segments, config), written_descriptors(slot, config)
    positional = (*operands, *written, slot.scalars, multiplier, partials, config.group)
    return positional, constants(slot, segments, config)


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


def constants(slot: Slot, segments: Sequence[Segment], config: Config) -> dict:
    """The kernel's compile-time arguments and launch options."""
    return {
        "RULE": (compiled_update(slot.rule), slot.rule.n_scalars),
        "OPERAND": TL_DTYPES[segments[0][0].dtype],
        "TILE": (config.block_o, config.block_i),
        "BLOCK_T": config.block_t,
        "STAGES": config.stages,
        "SLOTS": config.slots,
        "SLOT_BYTES": 64 * config.sub_i * sum(tensor.element_size() for tensor in _read(slot)),
        "PINGPONG": config.pingpong,
        "CHUNKS": config.chunks,
        "UNROLL": config.unroll,
        "REGISTERS": REGISTERS if len(segments) <= 2 else REGISTERS_MANY_SEGMENTS,
        "num_warps": 4,
        "maxnreg": MAXNREG,
    }


def _used(segments: Sequence[Segment]) -> list[Segment]:
    """Those with tokens, no more than the kernel has room for."""
    return merge_segments(_with_tokens(segments))


def _with_tokens(segments: Sequence[Segment]) -> list[Segment]:
    return [segment for segment in segments if segment[0].shape[0]]


def _read(slot: Slot) -> tuple[Tensor, ...]:
    """What a step both reads and writes: the weight or its master, then the states."""
    return (slot.weight if slot.master is None else slot.master, *slot.states)


def fitted(config: Config, slot: Slot) -> Config | None:
    """``config`` as :func:`fit` makes it for the storage of ``slot``."""
    read = [tensor.element_size() for tensor in _read(slot)]
    return fit(config, max(read), slot.element_bytes)


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
