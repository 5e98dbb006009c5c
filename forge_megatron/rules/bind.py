"""One piece of arithmetic, two languages: ``tl`` means ``triton.language`` or torch."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import torch

_LOW_WORD = 0xFFFFFFFF


def _cast(x: torch.Tensor, dtype: torch.dtype, bitcast: bool = False) -> torch.Tensor:
    """``dtype`` int64 stands for Triton's uint32: torch has no arithmetic on that."""
    if not bitcast:
        return x.to(dtype)
    if dtype is torch.int64:
        return x.view(torch.int32).to(torch.int64) & _LOW_WORD
    return (x.to(torch.int32) if x.dtype is torch.int64 else x).view(dtype)


#: The names of ``triton.language`` that rules and formats may use, on torch tensors. A uint32 is an
#: int64 below 2^32 here: mask what may grow beyond.
torch_language = SimpleNamespace(
    abs=torch.abs,
    cast=_cast,
    div_rn=lambda x, y: x / y,
    fdiv=lambda x, y: x / y,
    floor=torch.floor,
    fma=lambda x, y, z: torch.addcmul(z, x, y),
    maximum=torch.maximum,
    minimum=torch.minimum,
    sqrt=torch.sqrt,
    sqrt_rn=torch.sqrt,
    static_range=range,
    umulhi=lambda x, y: ((x * y) >> 32) & _LOW_WORD,
    where=torch.where,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    float32=torch.float32,
    float8e4nv=torch.float8_e4m3fn,
    int8=torch.int8,
    int32=torch.int32,
    uint8=torch.uint8,
    uint16=torch.int16,
    uint32=torch.int64,
)


def bind(fn: FunctionType, tl, compiled: Callable[[FunctionType], object] = lambda bound: bound):
    """Return ``fn`` with its global ``tl`` replaced, and that of the functions of this kind that it calls.

    The code object is shared, so a debugger, ``inspect.getsource`` and Triton's compiler all see
    the one source. ``fn`` may use no other global name that depends on the language.

    Args:
        fn: a function whose module has ``torch_language`` as ``tl``.
        tl: the language.
        compiled: what is made of each bound function.
    """
    called = {
        name: bind(value, tl, compiled)
        for name in fn.__code__.co_names
        if isinstance(value := fn.__globals__.get(name), FunctionType) and "tl" in value.__globals__
    }
    bound = FunctionType(fn.__code__, {**fn.__globals__, **called, "tl": tl}, fn.__name__)
    bound.__qualname__ = fn.__qualname__
    bound.__module__ = fn.__module__
    bound.__doc__ = fn.__doc__
    return compiled(bound)
