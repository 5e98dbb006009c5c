"""The parameters of one optimizer as the kernels see them: slots, and one table of scalars a device."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from forge_megatron.kernels import Slot
from forge_megatron.rules import Rule


def named_parameters(groups: list[dict]) -> list[tuple[str, Tensor]]:
    """What errors and tables call each parameter, in the order of the groups."""
    named: list[tuple[str, Tensor]] = []
    for group in groups:
        names = group.get("param_names") or itertools.repeat(None)
        for name, p in zip(names, group["params"], strict=False):
            named.append((name or f"parameter {len(named)}", p))
    return named


def joining(group: dict, groups: list[dict], names: Mapping[Tensor, str], trained: Container[Tensor]) -> dict:
    """``group`` as ``torch.optim`` takes it beside ``groups``.

    Its members are named where the others are. One that is among the others and was frozen so far moves: a
    model's frozen parameters are in a group from the start.
    """
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else members
    if isinstance(members, set):
        return group
    members = [member if isinstance(member, tuple) else (None, member) for member in members]
    moving = {p for _, p in members if p in names and p not in trained}
    for other in groups if moving else ():
        stays = [index for index, p in enumerate(other["params"]) if p not in moving]
        for key in ("params", "param_names"):
            if key in other:
                other[key] = [other[key][index] for index in stays]
    if not any("param_names" in other for other in groups):
        return {**group, "params": [p if name is None else (name, p) for name, p in members]}
    taken = itertools.count(len(names))
    named = [(name or names.get(p) or f"unnamed.{next(taken)}", p) for name, p in members]
    return {**group, "params": named} if named else {**group, "params": [], "param_names": []}


def _place(p: Tensor) -> tuple[int, int]:
    return p._version, p.data_ptr()


class Parameters:
    """Slots for every parameter, with hyperparameters and gradient norms in device memory.

    Hyperparameters are written once a window, when a backward is about to update weights or at
    ``step()``: a schedule is followed without a lag, and a captured graph reads the same memory.

    Attributes:
        all: the parameters in the order of the groups.
        labels: what errors and tables call them.
        slots: what a step of each reads and writes; a parameter that was never trainable has none.
    """

    def __init__(self, rule: Rule, groups: list[dict], state, labels: dict[Tensor, str]):
        self._rule = rule
        self._groups = groups
        self._state = state
        self.labels = labels
        self.all = [p for group in groups for p in group["params"]]
        self.slots: dict[Tensor, Slot] = {}
        self._tables: dict[torch.device, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._written: list[tuple[float, ...]] | None = None
        # Where and when each weight with a master was last written by a step.
        self._written_at: dict[Tensor, tuple[int, int]] = {}
        members: dict[torch.device, list[Tensor]] = {}
        for p in self.all:
            members.setdefault(p.device, []).append(p)
        self._rows: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for device, params in members.items():
            scalars = torch.zeros(len(params), rule.n_scalars, device=device)
            norms = torch.zeros(len(params), device=device)
            self._tables[device] = (params, scalars, norms)
            self._rows.update((p, (scalars[index], norms[index])) for index, p in enumerate(params))
        for p in self.all:
            if p in state:
                self.admit(p)

    def admit(self, p: Tensor) -> None:
        """Makes the slot of a parameter whose states exist now."""
        state = self._state[p]
        states = tuple(state[name] for name in self._rule.states)
        scalars, norm = self._rows[p]
        self.slots[p] = Slot(self._rule, p, states, scalars, state.get("master"), norm, self.labels[p])

    def without_states(self) -> list[Tensor]:
        """The parameters that were frozen and are to be stepped now."""
        return [p for p in self.all if p not in self.slots and (p.requires_grad or p.grad is not None)]

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
        for _, _, norms in self._tables.values():
            norms.zero_()
        self._refresh_masters()

    def follow_schedule(self, updated: str | None) -> None:
        """Writes the scalars again if hyperparameters changed since the window was opened.

        Args:
            updated: the name of a weight that has been updated with the old ones; None: none has.

        Raises:
            RuntimeError: some weights would be stepped with the old ones and others with the new.
        """
        if self._hyperparameters() == self._written:
            return
        if updated is not None:
            raise RuntimeError(
                f"a hyperparameter (lr, weight_decay ...) changed after backward had updated {updated} with the old "
                "one; change it before backward, or attach with waiting=True"
            )
        self._write()

    def _hyperparameters(self) -> list[tuple[float, ...]]:
        return [self._rule.scalars(group, 1) for group in self._groups]

    def _write(self) -> None:
        self._written = self._hyperparameters()
        group_of = {p: index for index, group in enumerate(self._groups) for p in group["params"]}
        rows: dict[tuple[int, int], tuple[float, ...]] = {}
        for params, scalars, _ in self._tables.values():
            table = []
            for p in params:
                taken = int(self._state[p]["step"]) if p in self.slots else 0
                key = group_of[p], taken + 1
                if key not in rows:
                    rows[key] = self._rule.scalars(self._groups[key[0]], key[1])
                table.append(rows[key])
            scalars.copy_(torch.tensor(table, dtype=torch.float32), non_blocking=True)

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
                slot.master.copy_(torch.where(slot.master.to(p.dtype) == p, slot.master, p.float()))

    def norms_sq(self) -> Tensor:
        """Σ g² of each parameter, fp32 ``[parameters]``, in the order of the groups, on the first device."""
        if len(self._tables) == 1:
            ((_, _, norms),) = self._tables.values()
            return norms.clone()
        return torch.stack([self._rows[p][1].to(self.all[0].device) for p in self.all])

    def by_device(self, params: Iterable[Tensor]) -> dict[torch.device, list[Slot]]:
        slots: dict[torch.device, list[Slot]] = {}
        for p in params:
            slots.setdefault(p.device, []).append(self.slots[p])
        return slots
