"""Hugging Face Accelerate: one line, ``accelerator = connect(Accelerator(...))``.

Accelerate clips and unscales ``.grad``, which owned weights do not have. A connected accelerator leaves both to the
:class:`ForgeOptimizer` that it prepared, and asks it whether a step was skipped.
"""

from __future__ import annotations

import math
from functools import partial, wraps

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from forge_megatron.optimizer import ForgeOptimizer


def connect(accelerator: Accelerator) -> Accelerator:
    """Lets ``accelerator`` train with a :class:`ForgeOptimizer`.

    ``accelerator.prepare(optimizer)``, ``backward``, ``accumulate``, ``clip_grad_norm_``, fp16's loss scale and
    ``optimizer_step_was_skipped`` then mean what they mean for ``torch.optim``. Clipping, accumulation and fp16 need
    an optimizer whose updates wait for ``step()``: ``forge.attach(..., waiting=True, accumulation_steps=None)``.

    Args:
        accelerator: changed in place, for this instance alone; other optimizers that it prepares are left as they are.

    Returns:
        The same accelerator.
    """
    prepare, clip = accelerator.prepare_optimizer, accelerator.clip_grad_norm_
    unscale, clip_value = accelerator.unscale_gradients, accelerator.clip_grad_value_
    accelerator.prepare_optimizer = wraps(prepare)(partial(_prepare_optimizer, prepare))
    accelerator.clip_grad_norm_ = wraps(clip)(partial(_clip_grad_norm_, accelerator, clip))
    accelerator.unscale_gradients = wraps(unscale)(partial(_unscale_gradients, accelerator, unscale))
    accelerator.clip_grad_value_ = wraps(clip_value)(partial(_clip_grad_value_, accelerator, clip_value))
    return accelerator


class AcceleratedForgeOptimizer(AcceleratedOptimizer):
    """What ``prepare`` returns: a skipped step is seen although ``step()`` is always called."""

    def step(self, closure=None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        # Reading the counter waits for the device, as torch's own GradScaler does.
        asked = self.scaler is not None or self.optimizer.skips_whole_steps
        before = self.optimizer.skipped_steps if asked else 0
        if self.scaler is not None:
            self.scaler.step(self.optimizer, closure)
            self.scaler.update()
        else:
            self.optimizer.step(closure)
        self._is_overflow = asked and self.optimizer.skipped_steps != before


def _prepare_optimizer(prepare, optimizer: torch.optim.Optimizer, device_placement: bool | None = None):
    prepared = prepare(optimizer, device_placement=device_placement)
    if isinstance(optimizer, ForgeOptimizer):
        prepared.__class__ = AcceleratedForgeOptimizer
    return prepared


def _ours(accelerator: Accelerator) -> list[AcceleratedForgeOptimizer]:
    return [optimizer for optimizer in accelerator._optimizers if isinstance(optimizer, AcceleratedForgeOptimizer)]


def _optimizer_of(accelerator: Accelerator, parameters: list[Tensor], what: str) -> ForgeOptimizer | None:
    """The one that steps ``parameters``; None if no ForgeOptimizer steps any of them.

    Raises:
        RuntimeError: it steps others too, or others step some of them: they would be left out.
    """
    given = set(parameters)
    for prepared in _ours(accelerator):
        optimizer = prepared.optimizer
        trained = {p for p in optimizer.names if p.requires_grad}
        if not trained & given:
            continue
        missing = next((name for p, name in optimizer.names.items() if p in trained - given), None)
        if missing is not None or any(p.requires_grad and p not in trained for p in given):
            raise RuntimeError(
                f"{what} of some of a ForgeOptimizer's parameters and not of others"
                + (f" ({missing} is left out)" if missing else "")
                + "; clip all parameters of one optimizer together, model.parameters()"
            )
        return optimizer
    return None


def _clip_grad_norm_(accelerator: Accelerator, clip, parameters, max_norm: float, norm_type: float = 2) -> Tensor:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    optimizer = _optimizer_of(accelerator, parameters, "clip_grad_norm_")
    if optimizer is None:
        return clip(parameters, max_norm, norm_type)
    if norm_type != 2:
        raise NotImplementedError(f"clip_grad_norm_ with norm_type={norm_type}: only the 2-norm is built; use 2")
    scale = None if accelerator.scaler is None else accelerator.scaler._get_scale_async()
    return optimizer.clip_grad_norm_(None if math.isinf(max_norm) else max_norm, loss_scale=scale)


def _clip_grad_value_(accelerator: Accelerator, clip, parameters, clip_value: float) -> None:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if _optimizer_of(accelerator, parameters, "clip_grad_value_") is not None:
        raise NotImplementedError(
            "clip_grad_value_: the gradient of an owned weight is never formed; use clip_grad_norm_"
        )
    clip(parameters, clip_value)


def _unscale_gradients(accelerator: Accelerator, unscale, optimizer=None) -> None:
    """step() unscales a ForgeOptimizer's gradients."""
    given = accelerator._optimizers if optimizer is None else optimizer
    given = given if isinstance(given, (list, tuple)) else [given]
    others = [each for each in given if not isinstance(each, (AcceleratedForgeOptimizer, ForgeOptimizer))]
    if others:
        unscale(others)
