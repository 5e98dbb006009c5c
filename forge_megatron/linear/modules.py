"""``nn.Linear`` whose weight may be owned: the same module, under another class."""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forge_megatron.linear.function import owned_linear
from forge_megatron.linear.owned import OwnedWeight, owner_of


class ForgeLinear(nn.Linear):
    """``nn.Linear`` that hands its weight gradient to the owner of its weight.

    A copy (``copy.deepcopy``, ``pickle``, ``torch.save``) is an ordinary ``nn.Linear`` with equal weights:
    it trains alone, and never updates the original.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if owner_of(weight) is None:
            if torch.is_grad_enabled() and weight.requires_grad:
                _expect_not_replaced(self)
            return F.linear(input, weight, self.bias)
        if DistributedDataParallel._active_ddp_module is not None:
            raise NotImplementedError(
                "an owned weight inside DistributedDataParallel is not built yet: its update would skip the "
                "reduction over ranks; train without the wrapper, or detach() first"
            )
        return owned_linear(input, weight, self.bias)

    def __reduce_ex__(self, protocol):
        return object.__new__, (_plain_class(type(self)),), self.__dict__.copy()


def _plain_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    return nn.Linear if cls is ForgeLinear else cls.__mro__[2]


# Weak on both sides: neither a module nor an optimizer lives on because it was attached.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OwnedWeight]] = weakref.WeakKeyDictionary()


def _expect_not_replaced(module: nn.Module) -> None:
    owned = _attached[module]() if module in _attached else None
    if owned is not None and owned.ledger is not None:
        raise RuntimeError(
            f"{owned.name}: the module's weight is another tensor than at attach, which nobody would step; "
            "replace, parametrize, prune or load_state_dict(assign=True) first, then attach"
        )


_subclasses: dict[type[nn.Linear], type[ForgeLinear]] = {nn.Linear: ForgeLinear}


def fuse(module: nn.Linear, owned: OwnedWeight) -> None:
    """Makes an ``nn.Linear`` (or a subclass that keeps its forward) a ForgeLinear, in place."""
    _attached[module] = weakref.ref(owned)
    cls = type(module)
    if isinstance(module, ForgeLinear):
        return
    if cls not in _subclasses:
        _subclasses[cls] = type(f"Forge{cls.__name__}", (ForgeLinear, cls), {"__module__": cls.__module__})
    module.__class__ = _subclasses[cls]


def unfuse(module: nn.Module) -> None:
    """Gives a ForgeLinear its own class back, in place."""
    if isinstance(module, ForgeLinear):
        module.__class__ = _plain_class(type(module))
        _attached.pop(module, None)
