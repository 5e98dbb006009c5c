"""Leaving a window without a step: what waits is dropped, and what has been stepped is not hidden."""

from __future__ import annotations

from forge_megatron.stepping import Stepping


class Discarding(Stepping):
    """``zero_grad()`` and ``rollback()``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards what waits for ``step()``, as torch discards ``.grad``.

        Raises:
            RuntimeError: a weight has already been updated since the last ``step()``.
        """
        held = self._had_gradient | {owned.weight for owned in self.owned.values() if owned.factors}
        for book in self._books:
            book.discard_window()
        self._drop_sums()
        self._gradients.close_window()
        self._parameters.reopen_window()
        self._had_gradient = set() if set_to_none else held
        self._zeroed = set(self._had_gradient)
        self._limit = self._measured_after = None
        super().zero_grad(set_to_none)

    def rollback(self, *, accept: bool = False) -> bool:
        """Leaves a window that was broken off, in backward or in ``step()``, by an exception or an interrupt.

        Drops kept factors, accumulators and every ``.grad``, so that their memory is free. Where updates wait for
        ``step()`` (``skip="atomic"``, ``waiting``, ``clip_grad_norm``, ``accumulation_steps``) nothing has changed,
        and training goes on with the next batch.

        Args:
            accept: keep the updates that have been made as a step of those weights alone.

        Returns:
            Whether training can go on. False: weights have been updated already, in backward or by an interrupted
            ``step()``; every use is an error from now on, until ``load_state_dict`` (of the model too) or
            ``rollback(accept=True)``.

        Raises:
            RuntimeError: called inside backward.
        """
        if accept and self._sums is not None:
            raise NotImplementedError("rollback(accept=True) with process_group= is not built; load a checkpoint")
        return self._leave_window(accept=accept)

    def _leave_window(self, *, accept: bool) -> bool:
        super().zero_grad(set_to_none=True)
        self._gradients.close_window()
        self._had_gradient.clear()
        self._zeroed.clear()
        self._limit = self._measured_after = None
        restored = [book.roll_back(accept=accept) for book in self._books]
        self._drop_sums()
        self._parameters.advance_running()
        self._parameters.reopen_window()
        return all(restored)
