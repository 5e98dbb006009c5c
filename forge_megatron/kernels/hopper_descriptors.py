"""What the copy engine is told of the Hopper kernel's operands: descriptors of matrices, and of experts in one tensor.

A tensor of experts ``[E, O, I]`` is described as such, so that a box at an expert's edge is cut there and not at the
next one's rows. Where the tokens of an expert end is known to the device alone. So the operands of experts, whose
tokens lie in their order, are described as ``[T, block, features]``: the window of ``block`` tokens from each token
on. Windows overlap, and a box that begins before its window's first row is zero there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .grouped_rows import GroupedRows
from .hopper_config import Config
from .merge import MAX_SEGMENTS
from .slot import Segment
from .triton_language import TL_DTYPES


def is_of_experts(segments: Sequence[Segment]) -> bool:
    """Whether the segments are a grouped weight's."""
    return isinstance(segments[0][0], GroupedRows)


def experts_of(segments: Sequence[Segment]) -> int | None:
    """How many experts the segments are of; None: they are a matrix's."""
    return len(segments[0][0].bounds) - 1 if is_of_experts(segments) else None


def copyable(tensor: Tensor) -> bool:
    """Whether the copy engine takes a matrix, or experts in one, as it lies: unit stride, rows 16-byte aligned."""
    if tensor.dim() == 3 and tensor.is_contiguous():
        tensor = tensor.view(-1, tensor.shape[2])
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


def tensors_of(segments: Sequence[Segment]) -> list[Tensor]:
    """Every dY, then every X, then every bounds of experts: in the order of :func:`operand_descriptors`."""
    dys, xs = [dy for dy, _ in segments], [x for _, x in segments]
    if not is_of_experts(segments):
        return dys + xs
    return [dy.rows for dy in dys] + xs + [dy.bounds for dy in dys]


def operand_descriptors(segments: Sequence[Segment], config: Config) -> tuple:
    """Every ``dY``, every ``X`` and every bounds of experts, each filled up with None."""
    count = len(segments)
    absent = [None] * (MAX_SEGMENTS - count)
    tensors = tensors_of(segments)
    dys = map(of_dy(segments, config), tensors[:count])
    xs = map(of_x(segments, config), tensors[count : 2 * count])
    bounds = tensors[2 * count :] or [None] * count
    return (*dys, *absent, *xs, *absent, *bounds, *absent)


def of_dy(segments: Sequence[Segment], config: Config) -> Callable[[Tensor], TensorDescriptor]:
    """What describes a dY to the producer of operands."""
    describe = _windows if is_of_experts(segments) else described
    return functools.partial(describe, rows=config.block_t, columns=64)


def of_x(segments: Sequence[Segment], config: Config) -> Callable[[Tensor], TensorDescriptor]:
    """What describes an X to the producer of operands."""
    describe = _windows if is_of_experts(segments) else described
    return functools.partial(describe, rows=config.block_t, columns=config.block_i)


def of_slot(config: Config) -> Callable[[Tensor], TensorDescriptor]:
    """What describes a weight, a state or a gradient, by sub-tiles."""
    return functools.partial(described, rows=64, columns=config.sub_i)


def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, or experts, in boxes of ``[rows, columns]`` of one."""
    return _descriptor(tensor, list(tensor.shape), list(tensor.stride()), rows, columns)


def _windows(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    tokens, features = tensor.shape
    stride = tensor.stride(0)
    return _descriptor(tensor, [tokens, rows, features], [stride, stride, 1], rows, columns)


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], rows: int, columns: int) -> TensorDescriptor:
    block = [1] * (len(shape) - 2) + [rows, columns]
    # Its own checks are those of copyable(), once more at every launch.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=tensor,
        shape=shape,
        strides=strides,
        block_shape=block,
        layout=_shared_layout(tuple(block), tensor.dtype),
        padding="zero",
    )
    return descriptor


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), TL_DTYPES[dtype])
