"""ForgeOptimizer: a ``torch.optim.Optimizer`` whose owned weights are stepped inside backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_megatron import kernels, rules
from forge_megatron.codes import store_dense
from forge_megatron.coordinator import (
    Buckets,
    FullySharded,
    NormsOverRanks,
    OrdinaryGradients,
    ShardGroup,
    Skips,
    SumFactors,
    across_ranks,
    grad_helpers,
    plan,
)
from forge_megatron.formats import in_memory
from forge_megatron.groups import complete, joining, named_parameters
from forge_megatron.linear import FusedStep, Ledger, OwnedWeight, accumulates
from forge_megatron.linear.attached import unfuse
from forge_megatron.linear.ownership import expect_separate_storage, expect_steppable
from forge_megatron.marker import KEY, mark_groups, marker, told_by
from forge_megatron.parameters import Parameters
from forge_megatron.random_bits import RandomBits
from forge_megatron.rules.whole import Whole
from forge_megatron.state import exported, load_state
from forge_megatron.tuning import Tunable


class ForgeOptimizer(Tunable):
    """Steps owned weights in the backward that completes their gradients, and the rest in :meth:`step`.

    Use :func:`forge_megatron.attach` for a plain model. Parameters that no linear hands over are stepped
    from ``.grad`` by the same rule, in one multi-tensor call, so that the object is one ordinary optimizer:
    ``param_groups`` that schedulers drive, ``state_dict`` in the layout of ``torch.optim``.

    Args:
        params: as ``torch.optim``'s: parameters, ``(name, parameter)`` pairs, or groups of either. A group may
            name its own rule and ``lr``: ``{"params": ..., "rule": "adamw", "lr": 1e-3}``.
        rule: a rule's name.
        recipe: names ``state_format`` and ``weight_store``, which may be given instead; a group may have its own.
        accumulation_steps: micro-batches a step; None: any number.
        accumulation_dtype: of a 16-bit parameter's sum of micro-batches: ``torch.float32``, or ``torch.bfloat16``,
            which takes half of the memory and is rounded with every micro-batch.
        clip_grad_norm: largest gradient norm; every weight then waits for ``step()``.
        clip: which norm: the ``"global"`` one of all parameters, or each ``"weight"``'s own.
        waiting: True: keep every weight's factors to ``step()`` (for ``gradient_multiplier``). False: the last of
            ``accumulation_steps`` micro-batches is added to the sum in registers and stepped in its own backward; None:
            it waits too. Clipping and ``skip="atomic"`` wait in any case.
        skip: what a gradient that is not finite does. ``"flag"``: its coordinates keep weight, master and states (with
            states in blocks, the whole block does; with a rule that reads a whole matrix, the weight), without weight
            decay; the others are stepped (clipped: by the coefficient of such a norm, 0, or with a NaN not at all) and
            every count rises. No weight becomes infinite or NaN, but a part of the step is taken, from a loss that was
            wrong.
            ``"atomic"``: nothing is changed at all; every weight then waits for ``step()``.
        seed, origins: of stochastic rounding, see :class:`~forge_megatron.random_bits.RandomBits`.
        wholes: of the parameters that are shards, where a rule reads more than one coordinate: the weight's.
        backend: ``"auto"``, or one of :data:`~forge_megatron.kernels.backend.BACKENDS` by name.
        process_group: the data-parallel ranks, whose gradients are summed in buckets that are stepped on arrival. What
            has a ``.grad``, which stays this rank's own, is summed in ``step()``; all ranks call it equally often.
        gradient_scale: of every gradient, such as one over the ranks whose losses are averaged; norms have it too.
        sharding: ``"states"`` (ZeRO): a rank, and its ``state_dict()``, holds its rows of the states; or ``"none"``.
        shard_group: with ``"states"``, the ranks of ``process_group`` that share one copy of them, such as those of one
            node (of a mesh ``(replica, shard)`` the last dimension's); gradients are summed over all. None: all ranks.
        buckets: their size, number and wire dtype, the mean or the sum.
        shards: what ``find_shards`` found in the model of parameters that ``fully_shard`` has sharded.
        hyperparameters: the rule's, by ``torch.optim``'s names; ``lr`` is required.

    Raises:
        TypeError, ValueError: an unknown hyperparameter, a value without a meaning, two parameters in the same memory.
        NotImplementedError: an option that is not built yet.
    """

    # GradScaler then leaves unscaling and skipping to step(), instead of looking for gradients that do not exist.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        rule: str = "adamw",
        *,
        recipe: str | None = None,
        state_format: str | None = None,
        weight_store: str | None = None,
        accumulation_steps: int | None = 1,
        accumulation_dtype: torch.dtype = torch.float32,
        clip_grad_norm: float | None = None,
        clip: str = "global",
        waiting: bool | None = None,
        skip: str = "flag",
        gradient_scale: float = 1.0,
        seed: int = 0,
        backend: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        sharding: str = "none",
        shard_group: dist.ProcessGroup | None = None,
        buckets: Buckets | None = None,
        origins: Mapping | None = None,
        wholes: Mapping[Tensor, Whole] | None = None,
        shards: Sequence[ShardGroup] = (),
        **hyperparameters,
    ):
        self.rule = rules.get(rule)
        self._formats = {"recipe": recipe, "state_format": state_format, "weight_store": weight_store}
        self._plan = plan(
            accumulation_steps=accumulation_steps,
            accumulation_dtype=accumulation_dtype,
            clip_grad_norm=clip_grad_norm,
            clip=clip,
            waiting=waiting,
            skip=skip,
            gradient_scale=gradient_scale,
            process_group=process_group,
            sharding=sharding,
            shard_group=shard_group,
            buckets=buckets,
            sharded=bool(shards),
        )
        self.random = RandomBits(seed, origins)
        self._wholes = dict(wholes or {})
        self.backend = backend
        self.owned: dict[Tensor, OwnedWeight] = {}
        self.reasons: dict[Tensor, str] = {}
        self.reduce_norm_sq: Callable[[Tensor], Tensor] = partial(torch.sum, dtype=torch.float64)
        self._parameters: Parameters | None = None
        self.fused_modules: list[nn.Module] = []
        in_fp32 = accumulation_dtype is torch.float32
        self._gradients = OrdinaryGradients(accumulate=self._plan.micro_batches != 1 and in_fp32)
        self._watching = False
        # What torch's zero_grad(set_to_none=False) would have left a .grad of zeros.
        self._had_gradient: set[Tensor] = set()
        self._zeroed: set[Tensor] = set()
        self._sums = across_ranks(self._plan, backend, self)
        now, later = self._sums or FusedStep(backend, gradient_scale), SumFactors(backend, accumulation_dtype)
        waits, micro_batches = self._plan.waits, self._plan.micro_batches
        self._ledger = Ledger(now, later, waits=waits, micro_batches=micro_batches, client=self)
        self._shards = FullySharded(shards, waits=waits, micro_batches=micro_batches, backend=backend, client=self)
        self._books = (self._ledger, self._shards)
        super().__init__(params, self.rule.resolve(hyperparameters))
        self._skips = Skips()
        self._measured: tuple[Tensor, Tensor | None] | None = None
        self._update_norms: dict[str, Tensor] = {}
        self._grad_norm = torch.zeros((), dtype=torch.float32, device=self._parameters.all[0].device)

    # ---- parameters

    def add_param_group(self, param_group: dict) -> None:
        """Adds parameters, whose states exist from now on; new ones are stepped from ``.grad``.

        With ``process_group=`` every rank adds the same ones, and gets the first rank's values of them.

        Raises:
            RuntimeError: a backward is pending, or a rank did not come.
            ValueError, TypeError: a bad hyperparameter or parameter, or another on other ranks; nothing has changed
                then.
        """
        for book in self._books:
            book.expect_nothing_pending("add parameters")
        param_group = complete(param_group, self.rule, self.defaults)
        trained = set(self.state)
        members = [
            {key: group[key] for key in ("params", "param_names") if key in group} for group in self.param_groups
        ]
        try:
            self._join(param_group)
        except Exception:
            del self.param_groups[len(members) :]
            for group, its in zip(self.param_groups, members, strict=True):
                group.update(its)
            for p in [p for p in self.state if p not in trained]:
                del self.state[p]
            if self._parameters is not None:
                self.register()
            raise

    def _join(self, param_group: dict) -> None:
        if self._parameters is not None:
            param_group = joining(param_group, self.param_groups, self.names, self.state)
        of_another_rule = self.defaults.keys() - param_group.keys()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in of_another_rule:
            del group[name]
        self.register()
        if self._synchronized:
            self.synchronize([part for p in group["params"] for part in in_memory(p)], "add_param_group()")

    def register(self) -> None:
        """Makes anew what is kept of the parameters, which have joined or lie in memory in another way."""
        named = named_parameters(self.param_groups)
        for label, p in named:
            expect_steppable(label, p)
            kernels.resolve_backend(p.device, self.backend)
        expect_separate_storage(named)
        labels = {p: label for label, p in named}
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        for p, label in labels.items():
            if p not in self.state and p.requires_grad:
                self.state[p] = self.new_state(p, label)
        self.random.place(labels, self._group_of, self._formats)
        local = None if self._sums is None else self._sums.local
        places = self.random, local, {p: self.whole(p) for p in labels}
        self._parameters = Parameters(self.rule, self.param_groups, self.state, labels, *places)
        self._shards.connect(labels, self._parameters.slots, self.state)
        if self._shards.group_of:
            self._parameters.over_ranks = NormsOverRanks(self._parameters.all)
        self._gradients.labels = labels
        for owned in self.owned.values():
            self._connect(owned)
        if self._watching:
            self.watch()

    def admit(self, p: Tensor) -> None:
        """Gives a parameter that was frozen until now its states."""
        self._shards.expect_managed(p)
        self.state[p] = self.new_state(p, self._parameters.labels[p])
        self._parameters.admit(p)
        if p in self.owned:
            self._connect(self.owned[p])
        elif self._watching:
            self._watch([p])

    def own(self, weight: Tensor, name: str | None = None) -> OwnedWeight:
        """Takes a weight ``[O, I]`` whose linear calls :func:`forge_megatron.linear.open_use`."""
        if weight not in self._parameters.labels:
            raise ValueError(f"{name or 'the weight'} is not among this optimizer's parameters")
        owned = OwnedWeight(weight, name or self._parameters.labels[weight], self._ledger)
        self.owned[weight] = owned
        self._ledger.owned.append(owned)
        self._connect(owned)
        # It has a .grad where something reads it without calling its module.
        self._gradients.widen([weight])
        return owned

    def _connect(self, owned: OwnedWeight) -> None:
        if owned.weight in self.state:
            owned.slot = self._parameters.slots[owned.weight]
            owned.step = self.state[owned.weight]["step"]

    def watch(self) -> None:
        """From now on, a change of ``.grad`` that leaves owned weights out is an error at ``step()``."""
        self._watching = True
        self.reasons.update(self._shards.reasons())
        self._watch(self._ordinary())
        grad_helpers.guard(self)

    def _watch(self, params: list[Tensor]) -> None:
        self._shards.watch(params)
        whole = [p for p in params if p not in self._shards.group_of]
        self._gradients.watch(whole)
        self._gradients.widen(whole)

    def name_without_grad(self, p: Tensor) -> str | None:
        owned = self.owned.get(p)
        if owned is not None and (owned.factors or owned.updated):
            return owned.name
        return self._shards.name_of_stepped(p)

    def _ordinary(self) -> list[Tensor]:
        return [p for p in self._parameters.all if p not in self.owned]

    # ---- what the pre-flight of a backward calls

    def expect_ready(self) -> None:
        self._gradients.expect_zeroed(at_step=not self._plan.waits)
        pending = next((owned for owned in self.owned.values() if owned.factors or owned.updated), None)
        if pending is not None:
            self._gradients.expect_untouched(pending.name)

    def accumulates_ordinary(self) -> bool:
        return any(accumulates(p) for p in self._ordinary() if p.requires_grad)

    def added_here(self) -> str | None:
        return self._gradients.added_here()

    def before_updates(self) -> None:
        """States for what is no longer frozen, and this window's hyperparameters."""
        self._parameters.expect_groups(self.param_groups)
        self._skips.settle_counts()
        self.state = self._parameters.take_over(self.state, self.new_state)
        for p in self._parameters.without_states():
            self.admit(p)
        self._parameters.open_window()

    # ---- switching off

    @contextmanager
    def paused(self):
        """Inside, forward and backward leave every weight, state and ``.grad`` of this optimizer alone.

        For a backward that passes through this model on its way to another (a generator's loss through
        its discriminator). A forward inside keeps nothing for the gradients of this optimizer's parameters.
        """
        with self._parameters.frozen():
            yield self

    def detach(self) -> None:
        """Makes the model's modules ordinary again; this optimizer then steps every weight from ``.grad``."""
        for book in self._books:
            book.expect_nothing_pending("detach")
        for owned in self.owned.values():
            owned.release()
        self._gradients.release()
        self._shards.release()
        self._watching = False
        grad_helpers.release(self)
        while self.fused_modules:
            unfuse(self.fused_modules.pop())
        self._ledger.owned.clear()
        self.owned.clear()
        self.reasons = dict.fromkeys(self._parameters.all, "detached")
        if store_dense(self._parameters.all):
            self.register()

    # ---- checkpoints

    def state_dict(self, *, full: bool = False) -> dict:
        """As ``torch.optim``'s (its class of the same rule loads it), with the rule and the formats beside it.

        States of 8 bits are codes, which torch would take for numbers: an optimizer with fp32 states loads them with
        ``convert=True``, and torch then its ``state_dict()``.

        Args:
            full: gather the states under ``sharding="states"``, on every rank of the group, which must all call it.
                Otherwise this rank's rows are saved, which the same rank of as many loads.

        Raises:
            RuntimeError: not every rank has asked for the whole.
        """
        for book in self._books:
            book.expect_usable()
            book.expect_nothing_pending("save")
        self._parameters.expect_groups(self.param_groups)
        self._skips.settle(wait=True)
        self.state = self._parameters.take_over(self.state, self.new_state)
        state_dict = super().state_dict()
        state_dict[KEY] = marker(self)
        if self._plan.sharding == "states":
            self._sums.label_states(state_dict, dict(enumerate(self._parameters.all)), full=full)
        mark_groups(self, state_dict, any_length=self._plan.micro_batches is None)
        return state_dict

    def exported_state(self, p: Tensor) -> dict[str, Tensor]:
        """The states of ``p`` for another optimizer's checkpoint, see :func:`~forge_megatron.state.exported`."""
        return exported(self._parameters.slots[p], self.state[p])

    def load_state_dict(self, state_dict: dict, *, convert: bool = False) -> None:
        """Restores states bit for bit; reads a ``torch.optim`` checkpoint of the same rule too.

        Parameters are matched by name where both sides have names, otherwise by order. A backward that waits for
        ``step()``, or failed, is discarded with every ``.grad`` of it.

        Args:
            state_dict: from :meth:`state_dict`, or of the same rule's class in ``torch.optim``.
            convert: allow states of another format, or masters that one side lacks, to be converted; warns of what was.

        Raises:
            ValueError: a parameter, state or shape is missing or differs, or the states are another rank's; nothing
                has changed then.
        """
        self._skips.settle(wait=True)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if self._plan.sharding == "states":
            self._sums.expect_own(told_by(state_dict))
        self.state = self._parameters.take_over(self.state, self.new_state)
        window = self._ledger.has_window()
        load_state(self, state_dict, convert)
        if window:
            super().zero_grad(set_to_none=True)
        for book in self._books:
            book.restored()
        self._drop_sums()
        self._parameters.close_window()
        self._gradients.close_window()
        self._had_gradient.clear()
        self._zeroed.clear()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self):
        raise TypeError("a ForgeOptimizer is tied to its model: copy or save its state_dict()")
