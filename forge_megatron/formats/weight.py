"""A weight that lies in memory as e4m3 codes with a scale for each block of 64 along the row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .code import BLOCK, as_bytes
from .fp8 import WEIGHT

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Fp8Weight(Tensor):
    """A tensor of ``dtype`` to everything that reads it: each operation gets a dequantised copy, which it lets go.

    It stays what it is under ``detach()``, ``clone()``, as a slice of rows, and in a ``state_dict``, whose
    ``torch.save`` keeps codes and scales bit for bit. ``copy_`` from another one copies both; from a plain tensor it
    rounds to the nearest codes, and so does ``weight.data = tensor``. Every other operation that writes is refused. A
    view of anything but rows is a dequantised copy, and what is written to it is lost.

    Attributes:
        codes: e4m3, of the weight's shape, contiguous.
        scales: bfloat16 ``[..., blocks]``, powers of two.
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype, requires_grad: bool = False):
        weight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        weight.codes, weight.scales = codes, scales
        return weight

    @classmethod
    def of(cls, tensor: Tensor) -> Fp8Weight:
        """``tensor``, rounded to the nearest codes."""
        codes, scales = WEIGHT.store(tensor.detach().float().contiguous())
        return cls(codes, scales, tensor.dtype)

    def dequantize(self) -> Tensor:
        """The weight in ``dtype``, outside autograd; bfloat16 and float32 hold every code exactly."""
        if self.dtype not in (torch.float32, torch.bfloat16):
            return WEIGHT.load(self.codes, self.scales).to(self.dtype)
        # In place: the scratch is one weight of this dtype.
        dense, scales = self.codes.to(self.dtype), self.scales.to(self.dtype)
        whole = dense.shape[-1] // BLOCK * BLOCK
        dense[..., :whole].unflatten(-1, (-1, BLOCK)).mul_(scales[..., : whole // BLOCK, None])
        dense[..., whole:].mul_(scales[..., whole // BLOCK :])
        return dense

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        # Module.to() and share_memory() give a weight what it has already.
        if isinstance(value, Fp8Weight) and value.codes is self.codes and value.dtype is self.dtype:
            return
        if value.shape != self.shape or value.device != self.device:
            raise NotImplementedError(
                f"a weight {list(self.shape)} on {self.device}, stored as e4m3 codes, is given .data "
                f"{list(value.shape)} on {value.device}; change shapes and devices before attach, or after detach()"
            )
        with torch.no_grad():
            self.copy_(value)
        if value.dtype is not self.dtype:
            Tensor.data.__set__(self, value)

    def __setitem__(self, index, value) -> None:
        rows = slice(None) if index is Ellipsis else index
        if not isinstance(rows, slice):
            raise NotImplementedError(
                f"weight[{index}] = ... of a weight that is stored as e4m3 codes, a scale for each {BLOCK} along the "
                "row; write whole rows, weight[start:end] = ..., or copy_ the whole"
            )
        super().__setitem__(rows, value)

    def share_memory_(self) -> Fp8Weight:
        self.codes.share_memory_()
        self.scales.share_memory_()
        return self

    def __repr__(self, **_) -> str:
        return f"Fp8Weight({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol):
        return Fp8Weight, (self.codes, self.scales, self.dtype, self.requires_grad)

    def __deepcopy__(self, memo):
        copy = Fp8Weight(self.codes.clone(), self.scales.clone(), self.dtype, self.requires_grad)
        copy._is_param = getattr(self, "_is_param", False)
        return memo.setdefault(id(self), copy)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _SAME:
            return Fp8Weight(args[0].codes, args[0].scales, args[0].dtype)
        if func is torch.ops.aten.clone.default:
            return Fp8Weight(args[0].codes.clone(), args[0].scales.clone(), args[0].dtype)
        if func is torch.ops.aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
            rows = slice(*args[2:])
            return Fp8Weight(args[0].codes[rows], args[0].scales[rows], args[0].dtype)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Fp8Weight):
            return _written(args[0], args[1])
        if _writes(func, args):
            raise NotImplementedError(
                f"{func} on a weight that is stored as e4m3 codes; copy_ is what writes one, rounding to the nearest"
            )
        args, kwargs = tree_map_only(Fp8Weight, Fp8Weight.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


def in_memory(tensor: Tensor) -> tuple[Tensor, ...]:
    """What lies in memory of ``tensor``: itself, or codes, as bytes, and scales."""
    return (as_bytes(tensor.codes), tensor.scales) if isinstance(tensor, Fp8Weight) else (tensor,)


def _written(weight: Fp8Weight, source: Tensor) -> Fp8Weight:
    if not isinstance(source, Fp8Weight):
        source = Fp8Weight.of(source.to(weight.device).expand(weight.shape))
    weight.codes.view(torch.uint8).copy_(source.codes.view(torch.uint8))
    weight.scales.copy_(source.scales)
    return weight


def _writes(func, args) -> bool:
    schema = zip(func._schema.arguments, args, strict=False)
    return any(
        isinstance(value, Fp8Weight) and a.alias_info is not None and a.alias_info.is_write for a, value in schema
    )


torch.serialization.add_safe_globals([Fp8Weight])
