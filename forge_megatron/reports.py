"""What a ForgeOptimizer tells of its steps. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from forge_megatron.coordinator import PartialSums, Plan, Skip, Skips
from forge_megatron.coverage import Coverage, cover
from forge_megatron.kernels import replay_bytes
from forge_megatron.linear import OwnedWeight
from forge_megatron.parameters import Parameters


class Reports(torch.optim.Optimizer):
    """Norms, skipped steps and the table of coverage.

    Attributes:
        owned: the weights that are stepped inside backward, or from kept factors.
        reasons: why others are not.
    """

    owned: dict[Tensor, OwnedWeight]
    reasons: dict[Tensor, str]
    _parameters: Parameters
    _plan: Plan
    _skips: Skips
    _sums: PartialSums | None
    _grad_norm: Tensor
    _update_norms: dict[str, Tensor]
    # Σ g² of the last step, and what the norms were multiplied by.
    _measured: tuple[Tensor, Tensor | None] | None

    @property
    def names(self) -> dict[Tensor, str]:
        """What errors, tables and checkpoints call each parameter, in the order of the groups."""
        return self._parameters.labels

    @property
    def grad_norm(self) -> Tensor:
        """The last step's global gradient norm before clipping, 0-dim fp32; reading it synchronises nothing.

        In the units of the loss: with the late scale, without a loss scale.
        """
        return self._grad_norm

    @property
    def gradient_norms(self) -> dict[str, Tensor]:
        """The norm of each trainable parameter's gradient in the last step, 0-dim fp32, in ``grad_norm``'s units.

        Before clipping, of this rank's part of the weight (of a DTensor: of the whole), 0 where there was no
        gradient; empty before the first step. Every step measures it, so that reading it costs a square root and
        synchronises nothing.
        """
        if self._measured is None:
            return {}
        norms_sq, scale = self._measured
        norms = norms_sq.sqrt() if scale is None else norms_sq.sqrt() * scale.abs()
        named = zip(self._parameters.labels.items(), norms.unbind(), strict=True)
        return {name: norm for (p, name), norm in named if p.requires_grad}

    @property
    def last_norms_sq(self) -> Tensor:
        """Σ g² of each parameter's gradient in the last step, fp32 ``[parameters]``, in the order of :attr:`names`.

        In the units of :attr:`grad_norm`, before clipping.
        """
        norms_sq, scale = self._measured
        return norms_sq if scale is None else norms_sq * scale.square()

    @contextmanager
    def measuring_updates(self) -> Iterator[None]:
        """Inside, every step measures how far it moves each weight, for :attr:`update_norms`.

        A launch then keeps one copy of the weight that it steps and reads both again; outside it costs nothing.
        """
        self._parameters.measure_updates(True)
        try:
            yield
        finally:
            self._update_norms = self._parameters.update_norms()
            self._parameters.measure_updates(False)

    @property
    def update_norms(self) -> dict[str, Tensor]:
        """‖W' − W‖ of each trainable parameter in the last step inside :meth:`measuring_updates`, 0-dim fp32.

        Of the fp32 master where there is one, and of this rank's part of the weight; 0 where nothing was stepped.
        """
        return self._parameters.update_norms() or dict(self._update_norms)

    @property
    def skips_whole_steps(self) -> bool:
        """``skip="atomic"``."""
        return self._plan.atomic

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradient was not finite: skipped whole (``skip="atomic"``, GradScaler), or where it was not.

        Waits for the last step to be finished by the device; :meth:`on_skip` does not.
        """
        self._skips.settle(wait=True)
        return self._skips.count

    @property
    def skip_counts(self) -> dict[str, int]:
        """Of :attr:`skipped_steps`, for each trainable parameter those in which its own gradient was not finite."""
        self._skips.settle(wait=True)
        return {name: self._skips.by_name[name] for p, name in self._parameters.labels.items() if p.requires_grad}

    def on_skip(self, callback: Callable[[Skip], None]) -> RemovableHandle:
        """Calls ``callback`` with a ``coordinator.Skip`` for each step that ``skipped_steps`` counts.

        It is called by ``step()``: by the same one on a CPU, by the next one on a GPU, whose flag is read without
        a synchronisation. A warning is logged in any case.

        Returns:
            A handle whose ``remove()`` takes the callback away.
        """
        handle = RemovableHandle(self._skips.callbacks)
        self._skips.callbacks[handle.id] = callback
        return handle

    @property
    def coverage(self) -> Coverage:
        """Each parameter: fused or the reason why not, and the bytes of its states."""
        bucket_bytes = 0 if self._sums is None else self._sums.held_bytes(sums=self._plan.keeps_sums)
        micro_batches = 1 if self._plan.waits else self._plan.micro_batches
        return cover(
            self._parameters.labels,
            self.state,
            self.owned,
            self.reasons,
            bucket_bytes,
            self.backend,
            micro_batches,
            replay_bytes(self._parameters.slots.values()),
        )
