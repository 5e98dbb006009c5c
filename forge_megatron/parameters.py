"""The parameters of one optimizer as the kernels see them: slots, and one table of scalars a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor

from forge_megatron.formats import scale_name
from forge_megatron.groups import formats_of, rule_of
from forge_megatron.kernels import LateNorms, Slot, local, settle, write_table
from forge_megatron.linear.counts import read_counts
from forge_megatron.random_bits import RandomBits
from forge_megatron.replaced import replacements
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole


def _place(p: Tensor) -> tuple[int, int]:
    return p._version, local(p).data_ptr()


class Parameters:
    """Slots for every parameter, with hyperparameters and gradient norms in device memory.

    Hyperparameters are written once a window, when a backward is about to update weights or at
    ``step()``: a schedule is followed without a lag, and a captured graph reads the same memory.

    Attributes:
        all: the parameters in the order of the groups.
        place: of each parameter among all.
        labels: what errors and tables call them.
        slots: what a step of each reads and writes; a parameter that was never trainable has none.
        advanced: the running numbers that the last step changed, each with what it was before.
        over_ranks: Σ g² of whole parameters from those of this rank's parts, ``[parameters]``, never in place.

    Args:
        rule: of the groups that name none.
        groups: the optimizer's.
        state: the optimizer's.
        labels: see above.
        random: the bits of the parameters that are rounded stochastically.
        held: gives the part of a parameter whose states this rank has; None: all of it. No method of the optimizer,
            which holds the parameters, and would then live until the collector finds both.
        wholes: the weights of which parameters are parts.
    """

    def __init__(
        self,
        rule: Rule,
        groups: list[dict],
        state,
        labels: dict[Tensor, str],
        random: RandomBits,
        held=None,
        wholes: Mapping[Tensor, Whole] | None = None,
    ):
        self._wholes = wholes or {}
        self._local = held or (lambda p: p)
        self._random = random
        self._formats = [formats_of(group) for group in groups]
        self._groups = groups
        self._members = [list(group["params"]) for group in groups]
        self._families = [rule_of(group, rule) for group in groups]
        self._rules = [family.variant(group) for family, group in zip(self._families, groups, strict=True)]
        self._group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
        self._state = state
        self.labels = labels
        self.all = [p for group in groups for p in group["params"]]
        self.place = {p: index for index, p in enumerate(self.all)}
        self.slots: dict[Tensor, Slot] = {}
        # The state tensors that slots, counters and captured graphs hold.
        self._made: dict[Tensor, dict[str, Tensor]] = {}
        self.over_ranks: Callable[[Tensor], Tensor] = torch.clone
        self._tables: dict[torch.device, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._update_norms_sq: dict[Tensor, Tensor] = {}
        self._written: list[tuple] | None = None
        # Of rules that keep running numbers: the count of updates that scalars were written for, and the
        # numbers after that update.
        self._after: dict[Tensor, tuple[int, tuple[float, ...]]] = {}
        self.advanced: list[tuple[Tensor, float]] = []
        # Where and when each weight with a master was last written by a step.
        self._written_at: dict[Tensor, tuple[int, int]] = {}
        members: dict[torch.device, list[Tensor]] = {}
        for p in self.all:
            members.setdefault(p.device, []).append(p)
        self._rows: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._late_norms: LateNorms = []
        for device, params in members.items():
            counts = [self._rule(p).n_scalars for p in params]
            scalars = torch.zeros(sum(counts), dtype=torch.float32, device=device)
            norms = torch.zeros(len(params), dtype=torch.float32, device=device)
            self._tables[device] = (params, scalars, norms)
            self._rows.update(zip(params, zip(scalars.split(counts), norms.unbind(), strict=True), strict=True))
        for p in self.all:
            if p in state:
                self.admit(p)

    def _rule(self, p: Tensor) -> Rule:
        return self._rules[self._group_of[p]]

    def admit(self, p: Tensor) -> None:
        """Makes the slot of a parameter whose states exist now."""
        state, rule = self._state[p], self._rule(p)
        self._made[p] = dict(state)
        states = tuple(state[name] for name in rule.states)
        scales = tuple(state[scale_name(name)] for name in rule.states if scale_name(name) in state)
        whole = self._wholes.get(p, WHOLE)
        shapes = rule.statistics(self._groups[self._group_of[p]], whole.shape(p))
        scalars, norm = self._rows[p]
        self.slots[p] = Slot(
            rule,
            p,
            states,
            scalars,
            master=state.get("master"),
            norm_sq=norm,
            name=self.labels[p],
            noise=self._random.of(p),
            scales=scales,
            update_norm_sq=self._update_norms_sq.get(p),
            statistics=tuple(state[name] for name in shapes),
            whole=whole,
            step=state["step"],
            late_norms=self._late_norms,
        )

    def take_over(self, state: Mapping, initial: Callable[[Tensor, str], dict[str, Tensor]]) -> Mapping:
        """Copies state that somebody put in the place of ours (``state[p][name] = tensor``, ``clear()``) into ours.

        Args:
            state: the optimizer's now.
            initial: the states of a parameter before its first step, which torch makes where there are none.

        Returns:
            The mapping that holds ours.

        Raises:
            RuntimeError: a state that is missing or does not fit, by name; nothing has changed then.
        """
        replaced = {}
        for p, made in self._made.items():
            found = state.get(p)
            if not found:
                replaced[p] = initial(p, self.labels[p])
            elif not all(map(is_, map(found.get, made), made.values())):
                replaced[p] = replacements(self.labels[p], made, found, {"step", *self._rule(p).running})
        if replaced:
            with torch.no_grad():
                for p, values in replaced.items():
                    for name, tensor in self._made[p].items():
                        if values[name] is not tensor:
                            tensor.copy_(values[name])
        if replaced or state is not self._state:
            for p, made in self._made.items():
                self._state[p] = {**state.get(p, {}), **made}
        return self._state

    def expect_groups(self, groups: list[dict]) -> None:
        """Raises if ``param_groups`` was edited: what was put in has no slot, and what was taken out still has one.

        Args:
            groups: the optimizer's now.

        Raises:
            RuntimeError: names a parameter where there is one; nothing has changed then.
        """
        kept = groups is self._groups and len(groups) == len(self._members)
        pairs = zip(groups, self._members, strict=True) if kept else ()
        if kept and all(len(g["params"]) == len(its) and all(map(is_, g["params"], its)) for g, its in pairs):
            return
        now = {p for group in groups for p in group["params"]}
        gone = next((f"{label} was taken out" for p, label in self.labels.items() if p not in now), None)
        new = next((f"a parameter {list(p.shape)} was put in" for p in now if p not in self.place), None)
        raise RuntimeError(
            f"optimizer.param_groups was edited: {gone or new or 'its groups are others'}; a group is added by "
            "add_param_group(), requires_grad_(False) ends the steps of a parameter, and for other parameters or "
            "groups call detach() and attach() again"
        )

    def without_states(self) -> list[Tensor]:
        """The parameters that were frozen and are to be stepped now."""
        if len(self.slots) == len(self.all):
            return []
        return [p for p in self.all if p not in self.slots and (p.requires_grad or p.grad is not None)]

    def rules_by_label(self) -> list[tuple[str, Rule]]:
        """The name of each group's first parameter, and the rule that the group's hyperparameters ask for now."""
        pairs = zip(self._families, self._groups, strict=True)
        return [(self.labels[group["params"][0]], rule.variant(group)) for rule, group in pairs if group["params"]]

    def counters(self) -> list[Tensor]:
        """What the host counts of every parameter: its updates, and the running numbers of its rule."""
        return [self._state[p][name] for p in self.slots for name in ("step", *self._rule(p).running)]

    def refresh_projections(self, params: Iterable[Tensor]) -> bool:
        """Whether the next update of one of ``params`` refreshes a projection."""
        if not any(rule.regime == "projected" for rule in self._rules):
            # Asked before every replay of a captured step.
            return False
        slots = (self.slots[p] for p in params if p.dim() == 2 and self._rule(p).regime == "projected")
        return any(slot.rule.stages.projection.is_due(int(slot.step)) for slot in slots)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, neither a forward nor a backward reaches any of the parameters."""
        trainable = [p for p in self.all if p.requires_grad]
        for p in trainable:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in trainable:
                p.requires_grad_(True)

    def open_window(self) -> None:
        """Writes the scalars of every parameter's next update, and empties the norms."""
        if self._written is not None:
            return
        self._write()
        for norms in (*(norms for _, _, norms in self._tables.values()), *self._update_norms_sq.values()):
            norms.zero_()
        # Of a window that was broken off.
        self._late_norms.clear()
        self._refresh_masters()

    def follow_schedule(self, updated: str | None) -> None:
        """Writes the scalars again if hyperparameters changed since the window was opened.

        Args:
            updated: the name of a weight that has been updated with the old ones; None: none has.

        Raises:
            RuntimeError: some weights would be stepped with the old ones and others with the new.
        """
        if self.hyperparameters() == self._written:
            return
        if updated is not None:
            raise RuntimeError(
                f"a hyperparameter (lr, weight_decay ...) changed after backward had updated {updated} with the old "
                "one; change it before backward, or attach with waiting=True"
            )
        self._write()

    def hyperparameters(self) -> list[tuple]:
        """Those of each group, as they can be compared."""
        pairs = zip(self._families, self._groups, strict=True)
        return [tuple(_plain(group[name]) for name in ("lr", *family.defaults)) for family, group in pairs]

    def step_counts(self) -> list[tuple[int, int]]:
        """How many parameters have been stepped how often."""
        counts = Counter(read_counts([made["step"] for made in self._made.values()]))
        counts[0] += len(self.all) - len(self._made)
        return sorted(counts.items())

    def _write(self) -> None:
        self._follow_options()
        self._written = self.hyperparameters()
        self._after.clear()
        rows: dict[tuple, tuple[float, ...]] = {}
        steps = dict.fromkeys(self.all, 1)
        counts = read_counts([made["step"] for made in self._made.values()])
        steps.update((p, count + 1) for p, count in zip(self._made, counts, strict=True))
        for params, scalars, _ in self._tables.values():
            table: list[float] = []
            for p in params:
                index = self._group_of[p]
                rule, group = self._rules[index], self._groups[index]
                step, running = steps[p], ()
                if rule.running:
                    state = self._state[p] if p in self.slots else rule.running
                    running = tuple(float(state[name]) for name in rule.running)
                key = index, step, *running
                if key not in rows:
                    rows[key] = rule.scalars(group, step, *running)
                if running and p in self.slots:
                    self._after[p] = step, rule.advance(group, step, *running)
                table += rows[key]
            write_table(scalars, torch.tensor(table, dtype=torch.float32))
        self._random.write(steps)

    def _follow_options(self) -> None:
        """Takes the rules' variants of now; raises if a group needs other states than there are."""
        for group, made in zip(self._groups, self._formats, strict=True):
            if formats_of(group) != made:
                raise RuntimeError(
                    f"{self.labels[group['params'][0]]}: its group now says {formats_of(group)}, and its states were "
                    f"made for {made}; attach with these formats"
                )
        for index, (family, rule, group) in enumerate(zip(self._families, self._rules, self._groups, strict=True)):
            needed = family.variant(group)
            if needed is rule or not group["params"]:
                continue
            if not needed.has_states_of(rule):
                raise RuntimeError(
                    f"{self.labels[group['params'][0]]}: the hyperparameters of its group now need the states "
                    f"{_listed(needed)}, and it has {_listed(rule)}; attach with these hyperparameters"
                )
            slotted = [p for p in group["params"] if p in self.slots]
            for p in slotted:
                self._expect_same_statistics(p, needed, group)
            self._rules[index] = needed
            for p in slotted:
                self.slots[p].rule = needed

    def _expect_same_statistics(self, p: Tensor, rule: Rule, group: dict) -> None:
        slot = self.slots[p]
        for (name, shape), old in zip(
            rule.statistics(group, slot.whole.shape(p)).items(), slot.statistics, strict=True
        ):
            if tuple(old.shape) != shape:
                raise RuntimeError(
                    f"{self.labels[p]}: the hyperparameters of its group now need {name} of {list(shape)}, and it is "
                    f"{list(old.shape)}; attach with these hyperparameters"
                )

    def advance_running(self) -> None:
        """Brings the running numbers of what was stepped in this window to its new count of updates."""
        self.advanced = []
        for p, (step, values) in self._after.items():
            state = self._state[p]
            if int(state["step"]) == step:
                for name, value in zip(self._rule(p).running, values, strict=True):
                    self.advanced.append((state[name], float(state[name])))
                    state[name].fill_(value)
        self._after.clear()

    def measure_updates(self, wanted: bool) -> None:
        """From now on, every step of a parameter writes how far it moved the weight, or no longer does."""
        measured = self.all if wanted else ()
        self._update_norms_sq = {p: torch.zeros((), dtype=torch.float32, device=p.device) for p in measured}
        for p, slot in self.slots.items():
            slot.update_norm_sq = self._update_norms_sq.get(p)

    def update_norms(self) -> dict[str, Tensor]:
        """How far the last window's step moved each trainable parameter, 0-dim fp32."""
        return {self.labels[p]: norm.sqrt() for p, norm in self._update_norms_sq.items() if p.requires_grad}

    def reopen_window(self) -> None:
        """The window was discarded: the next update writes its scalars anew."""
        self._written = None
        self._after.clear()

    def close_window(self) -> None:
        self._written = None
        self._written_at = {p: _place(p) for p, slot in self.slots.items() if slot.master is not None}

    @torch.no_grad()
    def _refresh_masters(self) -> None:
        """A weight that was written since the last step (a loaded checkpoint) gives its master the new value.

        Before the first step every weight is compared; later a copy into ``weight.data`` leaves no trace.
        """
        for p, slot in self.slots.items():
            if slot.master is not None and self._written_at.get(p) != _place(p):
                master, weight = local(slot.master), local(self._local(p))
                master.copy_(torch.where(master.to(p.dtype) == weight, master, weight.float()))

    def norms_sq(self) -> Tensor:
        """Σ g² of each parameter, fp32 ``[parameters]``, in the order of the groups, on the first device."""
        settle(self._late_norms)
        if len(self._tables) == 1:
            ((_, _, norms),) = self._tables.values()
        else:
            norms = torch.stack([self._rows[p][1].to(self.all[0].device) for p in self.all])
        return self.over_ranks(norms)

    def by_device(self, params: Iterable[Tensor]) -> dict[torch.device, list[Slot]]:
        slots: dict[torch.device, list[Slot]] = {}
        for p in params:
            slots.setdefault(p.device, []).append(self.slots[p])
        return slots


def _plain(value):
    """A hyperparameter as it can be compared: a tensor is written in place by a schedule."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value


def _listed(rule: Rule) -> str:
    return ", ".join(rule.states) or "none"
