"""``step()``: from what a window has left pending to stepped weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forge_megatron.coordinator import (
    Decision,
    FullySharded,
    LossScale,
    OrdinaryGradients,
    Pending,
    PendingSums,
    decide,
    global_norm,
    loss_scale,
)
from forge_megatron.coordinator.decision import expect_scale
from forge_megatron.coordinator.plan import Plan, plan
from forge_megatron.linear import Ledger
from forge_megatron.ranks import AcrossRanks


class Stepping(AcrossRanks):
    """Checks, decides and applies one window.

    Attributes:
        reduce_norm_sq: Σ over all parameters from Σ g² of each, ``[parameters]`` to 0-dim. Replaced where other ranks
            hold parts: it sums over them, counts replicas once, and so is also how all ranks skip together.
        backend: of the kernels.
    """

    reduce_norm_sq: Callable[[Tensor], Tensor]
    backend: str
    _plan: Plan
    _ledger: Ledger
    _shards: FullySharded
    _gradients: OrdinaryGradients
    # What clip_grad_norm_ asked of this window; what there was of it when its norms were measured.
    _limit: float | None = None
    _measured_after: tuple | None = None
    _had_gradient: set[Tensor]
    _zeroed: set[Tensor]
    # Calls of step(), and whether they are made inside a function that is captured.
    _calls: int = 0
    _capturing: bool = False

    def before_updates(self) -> None:
        """States for what is no longer frozen, and this window's hyperparameters."""
        raise NotImplementedError

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure=None,
        *,
        gradient_multiplier: float | Tensor | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ):
        """Steps what has not been stepped in backward, and closes the window.

        Args:
            closure: runs forward and backward again and returns the loss.
            gradient_multiplier: scales every gradient (for example one over the window's token count),
                a float or a 0-dim tensor; needs waiting (``clip_grad_norm``, ``accumulation_steps``,
                ``skip="atomic"`` or ``waiting=True``).
            grad_scaler: handed over by ``scaler.step(optimizer)``; needs waiting too. Gradients are unscaled, and
                where one is not finite nothing is changed and the scaler is told.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a multiplier that is no finite number; nothing has changed then.
            RuntimeError: the last backward failed; a factor was overwritten; an update would be wrong.
        """
        expect_scale(gradient_multiplier)
        self._calls += 1
        scaling = self._loss_scale(grad_scaler, closure)
        if self._capturing and (closure is not None or scaling is not None):
            what = "step(closure)" if closure is not None else "GradScaler"
            raise NotImplementedError(f"{what} inside capture(), which replays what the device did; run it eagerly")
        if gradient_multiplier is not None and not self._plan.waits:
            raise RuntimeError("gradient_multiplier= after weights were updated in backward; attach with waiting=True")
        self._skips.settle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for book in self._books:
            book.expect_usable()
        self._gradients.expect_zeroed()
        self.before_updates()
        pending = self._pending()
        updated = next((owned for owned in self.owned.values() if owned.updated), None)
        if updated is not None or pending.waiting:
            self._gradients.expect_untouched((updated or pending.waiting[0]).name)
        elif not pending.ordinary:
            self._ledger.expect_asked_for()
        self._parameters.follow_schedule(updated.name if updated is not None else self._shards.updated)
        stepped = [slot.weight for slots in pending.ordinary.values() for slot in slots]
        pending = self._across_ranks(
            pending,
            measures=self._measures_first(scaling),
            gradient_multiplier=gradient_multiplier,
            clip_grad_norm_=self._limit,
            loss_scale=None if scaling is None else scaling.inverse,
        )
        decision = self._decide(pending, gradient_multiplier, scaling)
        with self._ledger.updating():
            counts = pending.apply(decision, self.state)
            self._parameters.advance_running()
        self._report(decision, counts)
        self._limit = self._measured_after = None
        self._had_gradient.update(owned.weight for owned in self.owned.values() if owned.updated)
        if self._sums is not None:
            self._sums.close_window()
        for book in self._books:
            book.close_window()
        self._parameters.close_window()
        self._gradients.close_window(stepped if self.owned else None)
        self._skips.settle()
        return loss

    def skip_whole_steps(self) -> None:
        """From now on as with ``skip="atomic"``: a step whose ``gradient_multiplier`` is NaN changes nothing.

        Raises:
            RuntimeError: updates do not wait for ``step()``.
        """
        if not self._plan.waits:
            raise RuntimeError("a step that backward has begun cannot be skipped whole; attach with waiting=True")
        self._plan = replace(self._plan, atomic=True)

    def _loss_scale(self, grad_scaler, closure) -> LossScale | None:
        scaling = loss_scale(self, grad_scaler)
        if scaling is not None and closure is not None:
            raise RuntimeError("a closure with GradScaler, which scaled the loss outside it; call backward() yourself")
        if scaling is not None and not self._plan.waits:
            for book in self._books:
                book.refuse_scaled_updates()
        return scaling

    def _pending(self) -> Pending:
        """The weights that wait, and the parameters that are stepped from ``.grad``; checks both."""
        waiting = []
        for owned in self.owned.values():
            owned.expect_as_updated()
            owned.factors.expect_unchanged(owned.name)
            zeroed = not owned.updated and owned.weight.grad is None and owned.weight in self._zeroed
            if owned.factors or zeroed:
                waiting.append(owned)
        taken = {owned.weight for owned in waiting}
        ordinary = [p for p in self._parameters.all if p.grad is not None and p not in taken]
        for p in ordinary:
            if p in self.owned:
                self.owned[p].bypassed = True
        return Pending(waiting, self._parameters.by_device(ordinary), self._parameters.place, self.backend)

    def _decide(self, pending: Pending | PendingSums, gradient_multiplier, scaling: LossScale | None) -> Decision:
        device = self._grad_norm.device
        scale = None
        if gradient_multiplier is not None:
            scale = torch.as_tensor(gradient_multiplier, dtype=torch.float32, device=device)
        if self._scale_of_measured != 1.0:
            factor = torch.full((), self._scale_of_measured, device=device)
            scale = factor if scale is None else scale * factor
        if not self._measures_first(scaling):
            return Decision(scale, scale=scale)
        self._measure(pending)
        decision = decide(
            self._parameters.norms_sq(),
            self.reduce_norm_sq,
            late_scale=scale,
            inverse_loss_scale=None if scaling is None else scaling.inverse.to(device),
            limit=self._limit or self._plan.clip_grad_norm,
            each=self._plan.clip_each,
            atomic=self._plan.atomic or scaling is not None,
            found_inf=None if scaling is None else scaling.found_inf,
        )
        if scaling is not None:
            scaling.report(decision.skipped)
        return decision

    def _measures_first(self, scaling: LossScale | None) -> bool:
        """The norms decide what is stepped."""
        limited = self._limit is not None or self._plan.clip_grad_norm is not None
        return limited or self._plan.atomic or scaling is not None

    def _measure(self, pending: Pending | PendingSums) -> None:
        """Σ g² of everything pending; owned weights that no backward has reached since are not measured again."""
        if self._sums is not None:
            pending.measure()
            return
        grads = [owned.weight.grad for owned in pending.waiting if owned.weight.grad is not None]
        so_far = self._ledger.task_count, [(id(grad), grad._version) for grad in grads]
        pending.measure(ordinary_only=self._measured_after == so_far)
        self._measured_after = so_far

    def clip_grad_norm_(self, max_norm: float | None, *, loss_scale: Tensor | None = None) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` is to ``.grad``, for all of this optimizer's gradients.

        The norm is measured now; the update that follows in ``step()`` uses it. ``attach(clip_grad_norm=...)`` does
        the same at every step by itself.

        Args:
            max_norm: largest global norm of this window; None: only measure. Of several the smallest counts.
            loss_scale: what the loss was multiplied by, 0-dim.

        Returns:
            The norm without the loss scale, before clipping by ``max_norm`` and after that of calls before, 0-dim fp32.

        Raises:
            ValueError: a norm without a meaning, or another than ``attach`` was given.
            RuntimeError: weights have been updated inside backward already.
        """
        limit = plan(clip_grad_norm=max_norm).clip_grad_norm
        if limit is not None and not self._plan.waits:
            raise RuntimeError(
                "clip_grad_norm_ after weights were updated in backward; attach with clip_grad_norm= or waiting=True"
            )
        if limit is not None and self._plan.clip_grad_norm not in (None, limit):
            raise ValueError(
                f"clip_grad_norm_({max_norm}), but attach was given clip_grad_norm={self._plan.clip_grad_norm}; clip "
                "in one of the two places"
            )
        norms_sq = self._norms_sq(clip_grad_norm_=limit, loss_scale=loss_scale)
        scale = None if loss_scale is None else (1.0 / loss_scale.double()).float().to(norms_sq.device)
        norm = global_norm(norms_sq, self.reduce_norm_sq, scale)
        if (before := self._limit) is not None:
            norm = norm * torch.clamp(before / (norm + 1e-6), max=1.0)
        self._limit = min((each for each in (before, limit) if each is not None), default=None)
        return norm

    def _report(self, decision: Decision, counts: list[Tensor]) -> None:
        norms_sq = self._parameters.norms_sq()
        norm = decision.norm
        self._grad_norm = global_norm(norms_sq, self.reduce_norm_sq, decision.scale) if norm is None else norm
        self._measured = norms_sq, decision.scale
        names = list(self.names.values())
        self._skips.observe(
            norms_sq,
            self._grad_norm,
            names,
            whole=decision.skipped is not None,
            counts=counts,
            running=self._parameters.advanced,
        )

    def norms_sq(self) -> Tensor:
        """Σ g² of each parameter's pending gradient, fp32 ``[parameters]`` in the order of the groups.

        Reads the kept factors, the accumulators and ``.grad``; 0 where there is nothing. For a caller that
        clips over more than this optimizer: pass the coefficient as ``gradient_multiplier``.
        """
        return self._norms_sq()

    def _norms_sq(self, **asked) -> Tensor:
        self._ledger.expect_usable()
        self.before_updates()
        pending = self._across_ranks(self._pending(), measures=True, **asked)
        with torch.no_grad():
            self._measure(pending)
            return self._parameters.norms_sq() * self._scale_of_measured**2

    @property
    def _scale_of_measured(self) -> float:
        """What is left of ``gradient_scale`` after the norms were measured: sums over ranks have it."""
        return self._plan.gradient_scale if self._sums is None else 1.0
