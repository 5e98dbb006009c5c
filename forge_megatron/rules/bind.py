"""One piece of arithmetic, two languages: ``tl`` means ``triton.language`` or torch."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import torch

#: The names of ``triton.language`` that rules and formats may use, on torch tensors.
torch_language = SimpleNamespace(
    abs=torch.abs,
    cast=torch.Tensor.to,
    fma=lambda x, y, z: torch.addcmul(z, x, y),
    maximum=torch.maximum,
    minimum=torch.minimum,
    sqrt=torch.sqrt,
    where=torch.where,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    float32=torch.float32,
)


def bind(fn: FunctionType, tl) -> FunctionType:
    """Return ``fn`` with its global ``tl`` replaced.

    The code object is shared, so a debugger, ``inspect.getsource`` and Triton's compiler all see
    the one source. ``fn`` may use no other global name that depends on the language.
    """
    bound = FunctionType(fn.__code__, {**fn.__globals__, "tl": tl}, fn.__name__)
    bound.__qualname__ = fn.__qualname__
    bound.__module__ = fn.__module__
    bound.__doc__ = fn.__doc__
    return bound
