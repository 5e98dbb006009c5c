"""An optimizer among those of other ranks: what they compare, and what of a parameter each of them steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forge_megatron import kernels
from forge_megatron.coordinator import FullySharded, OrdinaryGradients, Pending, PendingSums, extent
from forge_megatron.groups import formats_of, rule_of
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
    _shards: FullySharded
    _synchronized: bool = False

    def admit(self, p: Tensor) -> None:
        """Gives a parameter that was frozen until now its states."""
        raise NotImplementedError

    def held(self, tensor: Tensor) -> Tensor:
        """What this rank steps of a parameter, or of a tensor of its shape."""
        return tensor if self._sums is None else self._sums.local(tensor)

    def held_rows(self, p: Tensor) -> slice:
        """The rows of ``p`` whose states this rank has."""
        return slice(0, extent(p)) if self._sums is None else self._sums.rows(p)

    @property
    def copy_of_states(self) -> int:
        """Which of the copies of the states this rank has rows of, from 0."""
        return 0 if self._sums is None else self._sums.ranks.instance

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

    def synchronize(self, tensors: Sequence[Tensor] = (), what: str = "attach(process_group=...)") -> None:
        """Compares the ranks of ``process_group`` and gives all of them the first rank's ``tensors``.

        Ranks that have shards of one model are compared too; what they hold is theirs.

        Args:
            tensors: none where somebody else gives them.
            what: that every rank does.

        Raises:
            ValueError: the ranks' models or options differ, by name; nothing has changed then.
        """
        # Marks, buckets and norms name a parameter by its place alone.
        layout = [(name, tuple(p.shape), str(p.dtype)) for p, name in self.names.items()]
        facts = {
            "rules": [rule_of(group, self.rule).name for group in self.param_groups],
            "formats": [{**self._formats, **formats_of(group)} for group in self.param_groups],
            "members": [len(group["params"]) for group in self.param_groups],
            "options": replace(self._plan, process_group=None, shard_group=None),
            "backend": self.backend,
            "seed": self.random.seed,
            "number of parameters": len(layout),
            "parameters in order": layout,
        }
        if self._sums is not None:
            self._sums.start(what, facts, tensors)
            self._synchronized = True
        else:
            hyperparameters = self._parameters.hyperparameters()
            self._shards.compare("attach(...)", {**facts, "hyperparameters": hyperparameters})

    def enter_wrapper(self, wrapper: DistributedDataParallel) -> None:
        if self._sums is None:
            raise NotImplementedError(
                "an owned weight inside DistributedDataParallel: its update would skip the reduction over ranks; "
                "attach with process_group=, train without the wrapper, or detach() first"
            )
        self._gradients.reduced_elsewhere = self._sums.enter_wrapper(wrapper)

    def _across_ranks(self, pending: Pending, *, measures: bool, **asked) -> Pending | PendingSums:
        """The same, summed over the ranks that each have a part of it.

        Args:
            measures: norms are needed before the first step.
            asked: of this step, see :meth:`shared_facts`.
        """
        if self._sums is None:
            return pending
        facts = self.shared_facts(**asked)
        again = any(facts[name] is not None for name in asked)
        return PendingSums(self._sums, self._sums.agree(pending, facts, measures=measures, again=again))

    def shared_facts(self, *, gradient_multiplier=None, clip_grad_norm_=None, loss_scale=None) -> dict[str, object]:
        """What must be equal on every rank that holds a part of the gradients.

        Args:
            gradient_multiplier, clip_grad_norm_, loss_scale: of this step: a number, a 0-dim tensor or None.
        """
        return {
            "gradient_multiplier": _on_host(gradient_multiplier),
            "clip_grad_norm_": _on_host(clip_grad_norm_),
            "loss_scale": _on_host(loss_scale),
            "hyperparameters": self._parameters.hyperparameters(),
            "step counts": self._parameters.step_counts(),
        }

    def _drop_sums(self) -> None:
        if self._sums is not None:
            self._sums.drop()


def _on_host(value: float | Tensor | None) -> float | None:
    """A number that the host knows; a device is not waited for."""
    known = value is not None and not (isinstance(value, Tensor) and value.device.type != "cpu")
    return float(value) if known else None
