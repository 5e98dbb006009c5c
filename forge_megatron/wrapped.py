"""A model with ``process_group=`` inside DistributedDataParallel: what that leaves alone, and what it reduces when."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forge_megatron.linear.untraced import untraced

if TYPE_CHECKING:
    from forge_megatron.optimizer import ForgeOptimizer

# Weak on both sides: a copy of a module has its hook, and is not in here.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[ForgeOptimizer]] = weakref.WeakKeyDictionary()


def stay_beside_ddp(model: nn.Module, optimizer: ForgeOptimizer) -> None:
    """A DistributedDataParallel that is built around ``model`` later leaves the weights of ``optimizer`` alone.

    The optimizer hears of each forward in it, also of one that reads no owned weight: what it leaves in ``.grad`` is
    reduced, or not.
    """
    model._ddp_params_and_buffers_to_ignore = _Owned(
        getattr(model, "_ddp_params_and_buffers_to_ignore", ()), model, optimizer
    )
    if model not in _attached:
        _attached[model] = weakref.WeakSet()
        model.register_forward_pre_hook(_enter)
    _attached[model].add(optimizer)


@untraced
def _enter(model: nn.Module, _) -> None:
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None:
        return
    for optimizer in list(_attached.get(model, ())):
        if optimizer.owned:
            optimizer.enter_wrapper(wrapper)


class _Owned(Collection):
    """The names of what is owned at the time: none once it is detached, and none in a copy of the module.

    Args:
        known: names that DistributedDataParallel was to ignore already.
    """

    def __init__(self, known: Collection[str], model: nn.Module, optimizer: ForgeOptimizer):
        self._known = known
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        model, optimizer = self._model(), self._optimizer()
        if model is not None and optimizer is not None:
            named = model.named_parameters(remove_duplicate=False)
            yield from (name for name, p in named if p in optimizer.owned)

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __len__(self) -> int:
        return len(set(self))

    def __reduce__(self):
        return list, (self._known,)
