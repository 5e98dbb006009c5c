"""The ``.grad`` of parameters that no linear hands over: everybody can see and change it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class OrdinaryGradients:
    """Notes what autograd wrote to ``.grad``, so that a change by anybody else is seen.

    An owned weight has no ``.grad``. Whatever clips, unscales or averages ``.grad`` after backward would
    change a part of the model and skip the owned weights; ``model.zero_grad()`` would discard the part of a
    window that lies in ``.grad`` and keep the other. Neither is exact, so both are refused.

    Attributes:
        labels: what errors call each parameter.
        reduced_elsewhere: those whose ``.grad`` a wrapper writes when backward ends.

    Args:
        accumulate: several backwards add to one ``.grad`` in fp32, as an owned weight's sum is: in bf16 a sum of 256
            and 1 is 256.
    """

    def __init__(self, *, accumulate: bool = False):
        self._accumulate = accumulate
        self._widened: set[Tensor] = set()
        self.labels: dict[Tensor, str] = {}
        self.reduced_elsewhere: frozenset[Tensor] = frozenset()
        self._noted: dict[Tensor, tuple[TensorWeakRef, int, int]] = {}
        self._stepped: tuple[Tensor, TensorWeakRef, int] | None = None
        self._left: str | None = None
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles, self._widened).atexit = False

    def watch(self, params: Iterable[Tensor]) -> None:
        """Notes what autograd accumulates into the trainable ones of ``params`` from now on."""
        for p in params:
            if p.requires_grad and p not in self._handles:
                hook = partial(_accumulated, weakref.ref(self))
                self._handles[p] = p.register_post_accumulate_grad_hook(hook)

    def widen(self, params: Iterable[Tensor]) -> None:
        """Where micro-batches accumulate: makes the ``.grad`` that autograd will write to ``params`` fp32."""
        for p in params if self._accumulate else ():
            if p.dtype in (torch.bfloat16, torch.float16) and p.grad is None:
                p.grad_dtype = torch.float32
                self._widened.add(p)

    def release(self) -> None:
        _remove(self._handles, self._widened)

    def note(self, p: Tensor) -> None:
        self._noted[p] = (TensorWeakRef(p.grad), p.grad._version, torch._C._current_graph_task_id())

    def expect_untouched(self, owned: str) -> None:
        """Raises if ``.grad`` was changed or dropped since autograd wrote it.

        Args:
            owned: the name of a weight whose gradient belongs to the same window.
        """
        task = torch._C._current_graph_task_id()
        noted = {p: it for p, it in self._noted.items() if task == -1 or it[2] != task}
        for p, (reference, version, _) in noted.items():
            if p.grad is None or p in self.reduced_elsewhere:
                continue
            if p.grad is not reference() or p.grad._version != version:
                raise RuntimeError(
                    f"{self.labels[p]}: its .grad was changed after backward, but {owned} is stepped without a "
                    ".grad and would be left out; clip with attach(clip_grad_norm=...), scale with "
                    "step(gradient_multiplier=...), and discard a window with optimizer.zero_grad()"
                )
        if noted and all(p.grad is None for p in noted):
            raise RuntimeError(
                f"every .grad was dropped after backward, but the gradient of {owned}, which has no .grad, was not; "
                "discard a window with optimizer.zero_grad()"
            )

    def added_here(self) -> str | None:
        """Inside a backward: what errors call a parameter to whose ``.grad`` it has added already."""
        task = torch._C._current_graph_task_id()
        return next((self.labels[p] for p, (_, _, its) in self._noted.items() if its == task), None)

    def expect_zeroed(self, *, at_step: bool = True) -> None:
        """Raises if the ``.grad`` of the last step is still there: it would be applied again.

        Args:
            at_step: False: only ``step()`` raises. Until then ``zero_grad()`` may drop it, with a gradient that another
                model's loss has added to it: that of a discriminator in its generator's backward.
        """
        if self._stepped is not None:
            p, reference, version = self._stepped
            if p.grad is not None and p.grad is reference() and p.grad._version == version:
                self._left = self.labels[p]
        if at_step and self._left is not None:
            raise RuntimeError(
                f"{self._left}: zero_grad() was not called after the last step(); its .grad would be "
                "applied again, while an owned weight's gradient is gone after its step"
            )

    def close_window(self, stepped: list[Tensor] | None = None) -> None:
        """After ``step()``, which read the ``.grad`` of ``stepped``, or ``zero_grad()``."""
        self._noted.clear()
        self._stepped = self._left = None
        if stepped:
            p = stepped[0]
            self._stepped = (p, TensorWeakRef(p.grad), p.grad._version)


def _accumulated(reference: weakref.ref[OrdinaryGradients], p: Tensor) -> None:
    gradients = reference()
    if gradients is not None and p.grad is not None:
        gradients.note(p)


def _remove(handles: dict, widened: set[Tensor]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
    for p in widened:
        grad, p.grad = p.grad, None
        p.grad_dtype = p.dtype
        p.grad = None if grad is None else grad.to(p.dtype)
    widened.clear()
