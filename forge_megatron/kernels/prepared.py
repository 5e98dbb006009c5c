"""Launches of a compiled kernel most of whose arguments never change, converted for the driver once.

Triton converts all of them at every launch: it encodes each tensor descriptor, asks the driver about each pointer, and
walks the constants. For a weight of a small model that takes longer than its kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType

from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from .backend import triton_version

#: The versions of Triton whose launcher takes what is made here; others convert by themselves.
LAUNCHERS = ((3, 6),)


#: Descriptors that a launch remembers for each operand: a step's tensors come to lie where the last step's lay.
REMEMBERED = 8


def prepare(
    compiled,
    grid: tuple[int, int, int],
    arguments: Sequence,
    changing: Sequence[int],
    describe: Mapping[int, Callable[[Tensor], object]] = MappingProxyType({}),
) -> Callable[..., None]:
    """What launches ``compiled`` on the current stream of the device on which it was compiled.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        grid: of every launch.
        arguments: the kernel's, constants too, in its order; the tensors among them stay where they are.
        changing: the positions of the tensors, or tuples of tensors, that each launch has anew, in the order in which
            it gives them.
        describe: for those of them that the kernel takes by a descriptor, what makes it.

    Returns:
        A function of one tensor, or tuple, for each of ``changing``, of the kind (and alignment) of ``arguments``.
    """
    convert = triton_version() in LAUNCHERS and not (
        compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    )
    plain = _Plain(compiled, grid, arguments, changing, describe)
    return _Converted(compiled, grid, arguments, changing, describe, plain) if convert else plain


class _Plain:
    """Triton's own way."""

    def __init__(self, compiled, grid, arguments, changing, describe):
        self._run = compiled[grid]
        # Not the first launch's operands, which would live for as long as this.
        self._arguments = [None if position in changing else it for position, it in enumerate(arguments)]
        self._changing = [(position, describe.get(position, _itself)) for position in changing]

    def __call__(self, *tensors: Tensor) -> None:
        arguments = self._arguments.copy()
        for (position, describe), tensor in zip(self._changing, tensors, strict=True):
            arguments[position] = describe(tensor)
        self._run(*arguments)


class _Converted:
    """Straight to the launcher that Triton has compiled, past the function that converts its arguments."""

    def __init__(self, compiled, grid, arguments, changing, describe, plain: _Plain):
        run = compiled.run
        self._launch, descriptors = run.launch, {}
        if isinstance(run.launch, FunctionType):
            inner = inspect.getclosurevars(run.launch).nonlocals
            descriptors = dict(zip(sorted(inner["tensordesc_indices"]), inner["tensordesc_meta"], strict=True))
            self._launch = inner["launcher"]
        self._device = driver.active.get_current_device()
        self._stream_of = driver.active.get_current_stream
        self._first = grid
        self._second = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._second += (compiled.packed_metadata, None, None, None)
        self._plain = plain
        self._fixed: list = []
        places: dict[int, _Pointer | _Descriptor] = {}
        for position, argument in enumerate(arguments):
            meta, begin = descriptors.get(position), len(self._fixed)
            self._fixed += _pointers([argument]) if meta is None else nvidia.make_tensordesc_arg(argument, meta)
            if position in changing:
                where = slice(begin, len(self._fixed))
                places[position] = _Pointer(where) if meta is None else _Descriptor(where, meta, describe[position])
        self._changing = [places[position] for position in changing]

    def __call__(self, *tensors: Tensor) -> None:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            # A profiler wants to know of the launch.
            self._plain(*tensors)
            return
        arguments = self._fixed.copy()
        for change, tensor in zip(self._changing, tensors, strict=True):
            arguments[change.where] = change(tensor)
        self._launch(*self._first, self._stream_of(self._device), *self._second, *arguments)


class _Pointer:
    """A tensor, or a tuple of some, as the launcher takes it."""

    def __init__(self, where: slice):
        self.where = where

    def __call__(self, tensor: Tensor | tuple[Tensor, ...]) -> list:
        return [tensor.data_ptr()] if isinstance(tensor, Tensor) else _pointers([tensor])


class _Descriptor:
    """A tensor's descriptor as the launcher takes it, made once for each place in memory."""

    def __init__(self, where: slice, meta: dict, describe: Callable[[Tensor], object]):
        self.where = where
        self._meta = meta
        self._describe = describe
        self._known: dict[tuple, list] = {}

    def __call__(self, tensor: Tensor) -> list:
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        made = self._known.get(key)
        if made is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            made = self._known[key] = nvidia.make_tensordesc_arg(self._describe(tensor), self._meta)
        return made


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _pointers(arguments: Sequence) -> list:
    """Tensors as numbers, also those in tuples."""
    return [
        argument.data_ptr()
        if isinstance(argument, Tensor)
        else tuple(_pointers(argument))
        if type(argument) is tuple
        else argument
        for argument in arguments
    ]
