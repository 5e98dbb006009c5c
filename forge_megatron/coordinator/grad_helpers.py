"""torch's helpers around ``.grad``: given a weight that is stepped without one they raise, and skip nothing.

Where every trained weight is owned, nothing else tells that a clipping, or a module's ``zero_grad()``, did not happen.
``clip_grad_norm_`` is covered however it was imported, for it looks its second half up when it is called.
``clip_grads_with_norm_`` is where it is called through ``torch.nn.utils``, or was imported after ``attach``;
``clip_grad_value_`` too, and without any ``.grad`` it raises by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

_PLACES = (
    (clip_grad, "_clip_grads_with_norm_"),
    (clip_grad, "clip_grad_value_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
)


class Client(Protocol):
    """An optimizer."""

    def name_without_grad(self, p: Tensor) -> str | None:
        """The name of ``p`` if this window's gradient of it is, or was, anywhere but in ``.grad``."""


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_guarded: dict[tuple[object, str], Callable] = {}


def guard(client: Client) -> None:
    """From now on and for as long as ``client`` lives, the helpers ask it."""
    if client not in _clients:
        _clients.add(client)
        weakref.finalize(client, _restore).atexit = False
    if not _guarded:
        for module, name in _PLACES:
            _guarded[module, name] = _guard(getattr(module, name))
        _guarded[nn.Module, "zero_grad"] = _guard_zeroing(nn.Module.zero_grad)
        for (module, name), guarded in _guarded.items():
            setattr(module, name, guarded)


def release(client: Client) -> None:
    """``client`` steps everything from ``.grad`` from now on."""
    _clients.discard(client)
    _restore()


def _restore() -> None:
    if any(True for _ in _clients):
        return
    for (module, name), guarded in _guarded.items():
        # Somebody else may have wrapped it since.
        if getattr(module, name) is guarded:
            setattr(module, name, guarded.__wrapped__)
    _guarded.clear()


def _guard(helper: Callable) -> Callable:
    @functools.wraps(helper)
    def guarded(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for p in parameters:
            if (name := _name_without_grad(p)) is not None:
                raise RuntimeError(
                    f"{name}: torch.nn.utils clips .grad, and the gradient of this weight, which has none, would be "
                    "left out; clip with attach(clip_grad_norm=...), or with optimizer.clip_grad_norm_() where updates "
                    "wait for step(); optimizer.grad_norm is the norm"
                )
        return helper(parameters, *args, **kwargs)

    return guarded


def _guard_zeroing(zero_grad: Callable) -> Callable:
    @functools.wraps(zero_grad)
    def guarded(module: nn.Module, *args, **kwargs):
        for p in module.parameters():
            if (name := _name_without_grad(p)) is not None:
                raise RuntimeError(
                    f"{name}: a module's zero_grad() drops .grad, and the gradient of this weight, which has none, "
                    "would be stepped all the same; discard a window with optimizer.zero_grad(), or end it with step()"
                )
        return zero_grad(module, *args, **kwargs)

    return guarded


def _name_without_grad(p: Tensor) -> str | None:
    return next((name for client in _clients if (name := client.name_without_grad(p)) is not None), None)
