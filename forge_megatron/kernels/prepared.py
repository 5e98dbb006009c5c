"""Launches of a compiled kernel most of whose arguments never change, converted for the driver once.

Triton converts all of them at every launch: it encodes each tensor descriptor, asks the driver about each pointer, and
walks the constants. For a weight of a small model that takes longer than its kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from .backend import triton_version

#: The versions of Triton whose launcher takes what is made here; others convert by themselves.
LAUNCHERS = ((3, 6),)


def prepare(compiled, grid: tuple[int, int, int], arguments: Sequence, changing: Sequence[int]) -> Callable[..., None]:
    """What launches ``compiled`` on the current stream.

    Args:
        compiled: what ``kernel[grid](...)`` returned.
        grid: of every launch.
        arguments: the kernel's, constants too, in its order; the tensors among them stay where they are.
        changing: the positions of the descriptors and tensors that each launch has anew.

    Returns:
        A function of one value for each of ``changing``, of the kind (and alignment) of the one in ``arguments``.
    """
    convert = triton_version() in LAUNCHERS and not (
        compiled.run.global_scratch_size or compiled.run.profile_scratch_size
    )
    plain = _Plain(compiled, grid, arguments, changing)
    return _Converted(compiled, grid, arguments, changing, plain) if convert else plain


class _Plain:
    """Triton's own way."""

    def __init__(self, compiled, grid, arguments, changing):
        self._run = compiled[grid]
        # Not the first launch's operands, which would live for as long as this.
        self._arguments = [None if position in changing else it for position, it in enumerate(arguments)]
        self._changing = tuple(changing)

    def __call__(self, *values) -> None:
        arguments = self._arguments.copy()
        for position, value in zip(self._changing, values, strict=True):
            arguments[position] = value
        self._run(*arguments)


class _Converted:
    """Straight to the launcher that Triton has compiled, past the function that converts its arguments."""

    def __init__(self, compiled, grid, arguments, changing, plain: _Plain):
        run = compiled.run
        inner = inspect.getclosurevars(run.launch).nonlocals
        descriptors = dict(zip(sorted(inner["tensordesc_indices"]), inner["tensordesc_meta"], strict=True))
        self._launch = inner["launcher"]
        self._first = grid
        self._second = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        self._third = (compiled.packed_metadata, None, None, None)
        self._plain = plain
        self._fixed: list = []
        self._changing: list[tuple[int, int, dict | None]] = []
        for position, argument in enumerate(arguments):
            meta = descriptors.get(position)
            converted = _convert(argument, meta)
            if position in changing:
                self._changing.append((len(self._fixed), len(self._fixed) + len(converted), meta))
            self._fixed += converted

    def __call__(self, *values) -> None:
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            # A profiler wants to know of the launch.
            self._plain(*values)
            return
        arguments = self._fixed.copy()
        for (begin, end, meta), value in zip(self._changing, values, strict=True):
            arguments[begin:end] = _convert(value, meta)
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        self._launch(*self._first, stream, *self._second, *self._third, *arguments)


def _convert(argument, meta: dict | None) -> list:
    """One argument as the launcher takes it: a descriptor is five, and a pointer is a number."""
    if meta is not None:
        return nvidia.make_tensordesc_arg(argument, meta)
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument]
