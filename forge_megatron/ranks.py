"""An optimizer among those of other ranks: what they compare, and what of a parameter each of them steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forge_megatron import kernels
from forge_megatron.coordinator import OrdinaryGradients, Pending, PendingSums, extent
from forge_megatron.groups import rule_of
from forge_megatron.reports import Reports
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole
from forge_megatron.state import new_state


class AcrossRanks(Reports):
    """Gradients of which each rank of ``process_group`` has a part; without a group all of it does nothing."""

    rule: Rule
    _formats: Mapping
    _group_of: Mapping[Tensor, dict]
    _wholes: Mapping[Tensor, Whole]
    _gradients: OrdinaryGradients

    def admit(self, p: Tensor) -> None:
        """Gives a parameter that was frozen until now its states."""
        raise NotImplementedError

    def held(self, tensor: Tensor) -> Tensor:
        """What this rank steps of a parameter, or of a tensor of its shape."""
        return tensor if self._sums is None else self._sums.local(tensor)

    def held_rows(self, p: Tensor) -> slice:
        """The rows of ``p`` whose states this rank has."""
        return slice(0, extent(p)) if self._sums is None else self._sums.rows(p)

    def new_state(self, p: Tensor, label: str) -> dict[str, Tensor]:
        """The states that ``p`` would have; raises ``NotImplementedError`` for what no schedule can step."""
        group = self._group_of[p]
        if self._sums is not None:
            self._sums.expect_storable(label, rule_of(group, self.rule).variant(group), p.shape)
        return new_state(self.rule, group, self.held(p), label, self._formats, self.whole(p))

    def whole(self, p: Tensor) -> Whole:
        """The weight of which this rank steps a part, as far as the rule of ``p`` asks."""
        whole = self._wholes.get(p, WHOLE)
        return whole if self._sums is None or not self.reads_whole(p) else self._sums.whole(p, whole)

    def reads_whole(self, p: Tensor) -> bool:
        """Whether the rule of ``p`` reads more of its gradient than one coordinate."""
        return rule_of(self._group_of[p], self.rule).regime != "fused"

    def slot(self, p: Tensor) -> kernels.Slot:
        """What a step of ``p`` reads and writes; makes the states of one that was frozen."""
        if p not in self._parameters.slots:
            self.admit(p)
        return self._parameters.slots[p]

    def synchronize(self, tensors: Sequence[Tensor] = ()) -> None:
        """Compares the ranks of ``process_group`` and gives all of them the first rank's ``tensors``.

        Raises:
            ValueError: the ranks' models or options differ, by name; nothing has changed then.
        """
        if self._sums is not None:
            names = [rule_of(group, self.rule).name for group in self.param_groups]
            asked = replace(self._plan, process_group=None)
            self._sums.start(
                {"rules": names, "formats": self._formats, "options": asked, "seed": self.random.seed}, tensors
            )

    def enter_wrapper(self, wrapper: DistributedDataParallel) -> None:
        if self._sums is None:
            raise NotImplementedError(
                "an owned weight inside DistributedDataParallel: its update would skip the reduction over ranks; "
                "attach with process_group=, train without the wrapper, or detach() first"
            )
        self._gradients.reduced_elsewhere = self._sums.enter_wrapper(wrapper)

    def _across_ranks(self, pending: Pending, gradient_multiplier=None) -> Pending | PendingSums:
        """The same, summed over the ranks that each have a part of it."""
        if self._sums is None:
            return pending
        return PendingSums(self._sums, self._sums.agree(pending, self.shared_facts(gradient_multiplier)))

    def shared_facts(self, gradient_multiplier: float | Tensor | None = None) -> dict[str, object]:
        """What must be equal on every rank that holds a part of the gradients; a device is not waited for."""
        on_host = not isinstance(gradient_multiplier, Tensor) or gradient_multiplier.device.type == "cpu"
        factor = float(gradient_multiplier) if gradient_multiplier is not None and on_host else None
        return {"gradient_multiplier": factor, "hyperparameters": self._parameters.hyperparameters()}

    def _drop_sums(self) -> None:
        if self._sums is not None:
            self._sums.drop()
