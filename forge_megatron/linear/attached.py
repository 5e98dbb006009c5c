"""Modules that are attached: the same module under another class, whose forward knows an owned weight."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forge_megatron.linear.hooks import has_gradient_hook
from forge_megatron.linear.owned import OwnedWeight, owner_of

# Weak on both sides: neither a module nor an optimizer lives on because it was attached.
_attached: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[OwnedWeight]]] = weakref.WeakKeyDictionary()


class Attached:
    """First base of a module class that hands the gradient of ``self.weight``, or of others, to the weight's owner.

    A copy (``copy.deepcopy``, ``pickle``, ``torch.save``) is an ordinary module with equal weights: it
    trains alone, and never updates the original.

    Attributes:
        plain: the class that the module had, and that :func:`unfuse` gives back.
    """

    plain: ClassVar[type[nn.Module]]

    def owner_in_forward(self, name: str = "weight") -> OwnedWeight | None:
        """The weight's owner, or None where the plain forward is right: also while a gradient hook is registered.

        Args:
            name: of the weight in the module.

        Raises:
            RuntimeError: the weight was replaced after attach; nobody would step the new one.
            NotImplementedError: inside DistributedDataParallel, and gradients are not summed over ranks.
        """
        # nn.Module's own look-up takes longer, and a parametrized weight is not there.
        weight = self._parameters.get(name)
        if weight is None:
            weight = getattr(self, name)
        owned = owner_of(weight)
        if owned is None:
            if torch.is_grad_enabled() and weight.requires_grad:
                _expect_not_replaced(self, name)
        elif DistributedDataParallel._active_ddp_module is not None and owned.ledger is not None:
            owned.ledger.enter_wrapper(DistributedDataParallel._active_ddp_module)
        return None if has_gradient_hook(weight) else owned

    def __reduce_ex__(self, protocol):
        return object.__new__, (type(self).plain,), self.__dict__.copy()


def _expect_not_replaced(module: nn.Module, name: str) -> None:
    reference = _attached.get(module, {}).get(name)
    owned = None if reference is None else reference()
    if owned is not None and owned.ledger is not None:
        raise RuntimeError(
            f"{owned.name}: the module's weight is another tensor than at attach, which nobody would step; "
            "fully_shard, replace, parametrize, prune or load_state_dict(assign=True) first, then attach"
        )


_subclasses: dict[type[nn.Module], type[Attached]] = {}


def fuse(module: nn.Module, owned: OwnedWeight, forge: type[Attached], name: str = "weight") -> None:
    """Makes a module of ``forge.plain`` (or of a subclass that keeps its forward) a ``forge``, in place.

    Args:
        owned: its weight.
        name: of the weight in the module.
    """
    _attached.setdefault(module, {})[name] = weakref.ref(owned)
    cls = type(module)
    if isinstance(module, Attached):
        return
    if cls is forge.plain:
        module.__class__ = forge
        return
    if cls not in _subclasses:
        members = {"__module__": cls.__module__, "plain": cls}
        _subclasses[cls] = type(f"Forge{cls.__name__}", (forge, cls), members)
    module.__class__ = _subclasses[cls]


def unfuse(module: nn.Module) -> None:
    """Gives an attached module its own class back, in place."""
    if isinstance(module, Attached):
        module.__class__ = type(module).plain
        _attached.pop(module, None)
