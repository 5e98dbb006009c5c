"""The loss scale of a ``torch.amp.GradScaler`` in one ``step()``: unscaled, checked and reported for every gradient.

``GradScaler`` looks for infinities in ``.grad``, which owned weights do not have. Of torch's two protocols for an
optimizer with ``_step_supports_amp_scaling`` one hands ``step()`` the scaler itself (``grad_scaler=``), the other sets
``optimizer.grad_scale`` and ``optimizer.found_inf``. Only the first has a way back: an overflow in an owned gradient
must reach ``scaler.update()``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

# torch tells the authors of optimizers to prefer the protocol without a way back; users can do nothing about it.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


@dataclass(frozen=True)
class LossScale:
    """
    Attributes:
        inverse: one over the scale, 0-dim fp32 on the scale's device.
        found_inf: what whoever set ``optimizer.found_inf`` had seen in ``.grad``; None with a scaler.
        record: the scaler's book on this optimizer.
    """

    inverse: Tensor
    found_inf: Tensor | None = None
    record: dict | None = None

    def report(self, overflow: Tensor) -> None:
        """Tells the scaler what its ``update()`` must know.

        Args:
            overflow: 0-dim bool, of every gradient.

        Raises:
            RuntimeError: there is no scaler to tell, and it has not seen the overflow itself.
        """
        if self.record is not None:
            self.record["found_inf_per_device"] = {self.inverse.device: overflow.to(self.inverse).clone()}
        elif bool(overflow) and not bool(self.found_inf):
            raise RuntimeError(
                "a gradient of an owned weight overflowed, and GradScaler cannot be told, because something wraps "
                "optimizer.step() and hides that it takes grad_scaler=; keep its signature (functools.wraps), or "
                "pass grad_scaler= on. Nothing was changed; zero_grad() discards the window"
            )


def loss_scale(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> LossScale | None:
    """What ``scaler.step(optimizer)`` gave, by either protocol; None without a scaler.

    Raises:
        RuntimeError: ``.grad`` has been unscaled already; a protocol without a way back and no ``.grad`` at all.
    """
    if scaler is not None:
        record = scaler._per_optimizer_states[id(optimizer)]
        if record["stage"] is not OptState.READY:
            raise RuntimeError(
                "scaler.unscale_(optimizer) unscales .grad, which owned weights do not have; drop the call: step() "
                "unscales, attach(clip_grad_norm=...) clips, and optimizer.grad_norm is the unscaled norm"
            )
        return LossScale(_inverse(scaler._get_scale_async()), record=record)
    scale = optimizer.__dict__.get("grad_scale")
    found_inf = optimizer.__dict__.get("found_inf")
    if scale is None and found_inf is None:
        return None
    if not isinstance(scale, Tensor) or not isinstance(found_inf, Tensor):
        raise RuntimeError(
            "GradScaler found no .grad, or .grad that was unscaled before; something wraps optimizer.step() and hides "
            "that it takes grad_scaler=: keep its signature (functools.wraps), and drop scaler.unscale_(optimizer)"
        )
    return LossScale(_inverse(scale), found_inf=found_inf)


def _inverse(scale: Tensor) -> Tensor:
    # As torch does: a reciprocal in fp32 can be one unit off.
    return scale.double().reciprocal().float()
