"""What ``step()`` does with gradients that are pending: kept factors, and ``.grad`` of ordinary parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_megatron import kernels
from forge_megatron.coordinator.decision import Decision
from forge_megatron.coordinator.gradients import dense, summed_before
from forge_megatron.kernels import local
from forge_megatron.linear import OwnedWeight
from forge_megatron.linear.counts import raise_counts


@dataclass(frozen=True)
class Pending:
    """The gradients of one window.

    Attributes:
        waiting: owned weights with kept factors.
        ordinary: slots that are stepped from ``.grad``, by device.
        place: of each parameter in a vector of all.
        backend: of the kernels.
    """

    waiting: Sequence[OwnedWeight]
    ordinary: Mapping[torch.device, Sequence[kernels.Slot]]
    place: Mapping[Tensor, int]
    backend: str

    def measure(self, *, ordinary_only: bool = False) -> None:
        """Writes Σ g² of every pending gradient to its slot; no gradient of a linear is formed whole.

        Args:
            ordinary_only: owned weights have been measured.
        """
        waiting = () if ordinary_only else self.waiting
        # A sum with what lies in .grad is as large as its weight: one at a time.
        apart = [[owned] for owned in waiting if owned.weight.grad is not None]
        for group in [owned for owned in waiting if owned.weight.grad is None], *apart:
            kernels.wgrad_norms_sq(
                [owned.factors.segments for owned in group],
                [owned.slot.norm_sq for owned in group],
                accumulators=[summed_before(owned) for owned in group],
                shapes=[owned.weight.shape for owned in group],
                backend=self.backend,
            )
        for slots in self.ordinary.values():
            norms = torch._foreach_norm([local(dense(slot.weight.grad)).float() for slot in slots])
            for slot, norm in zip(slots, norms, strict=True):
                slot.norm_sq.copy_(norm.square())

    def apply(self, decision: Decision, states: Mapping[Tensor, Mapping[str, Tensor]]) -> list[Tensor]:
        """Steps every weight once, with the decision's multiple of its gradient.

        Args:
            decision: without a norm, Σ g² is written too; otherwise :meth:`measure` has.
            states: of each parameter, with its ``step``.

        Returns:
            The step counts that were raised.
        """
        multiplier, with_norms = decision.multiplier, decision.norm is None
        counts: list[Tensor] = []
        for device, slots in self.ordinary.items():
            grads, common = self._scaled(slots, multiplier)
            kernels.step(
                [_slot(slot, with_norms) for slot in slots],
                grads,
                multiplier=_on(common, device),
                backend=self.backend,
            )
            torch.autograd.graph.increment_version([slot.weight for slot in slots])
            counts += (stepped := [states[slot.weight]["step"] for slot in slots])
            raise_counts(stepped)
        for indices in kernels.stacks([owned.slot for owned in self.waiting]):
            stack = [self.waiting[index] for index in indices]
            kernels.wgrad_steps(
                [_slot(owned.slot, with_norms) for owned in stack],
                [owned.factors.segments for owned in stack],
                accumulators=[summed_before(owned) for owned in stack],
                multipliers=[_on(self._of(owned.weight, multiplier), owned.weight.device) for owned in stack],
                backend=self.backend,
            )
            for owned in stack:
                owned.mark_updated()
                owned.factors.clear()
            counts += (stepped := [states[owned.weight]["step"] for owned in stack])
            raise_counts(stepped)
        return counts

    def _of(self, weight: Tensor, multiplier: Tensor | None) -> Tensor | None:
        """The multiplier of one weight."""
        return multiplier if multiplier is None or multiplier.dim() == 0 else multiplier[self.place[weight]]

    def _scaled(self, slots, multiplier: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
        """The ``.grad`` of ``slots`` and the one multiplier that is left to apply to all of them."""
        grads = [local(dense(slot.weight.grad)) for slot in slots]
        if multiplier is None or multiplier.dim() == 0:
            return grads, multiplier
        device = slots[0].weight.device
        own = [self._of(slot.weight, multiplier).to(device) for slot in slots]
        return [grad.float() * factor for grad, factor in zip(grads, own, strict=True)], None

    def params(self) -> set[Tensor]:
        ordinary = {slot.weight for slots in self.ordinary.values() for slot in slots}
        return ordinary | {owned.weight for owned in self.waiting}


def _slot(slot: kernels.Slot, with_norms: bool) -> kernels.Slot:
    return slot if with_norms else kernels.without_norm(slot)


def _on(multiplier: Tensor | None, device: torch.device) -> Tensor | None:
    return None if multiplier is None else multiplier.to(device)
