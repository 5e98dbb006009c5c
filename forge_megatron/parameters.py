"""The parameters of one optimizer as the kernels see them: slots, and one table of scalars a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from forge_megatron.kernels import Slot
from forge_megatron.rules import Rule


class Parameters:
    """Slots for every parameter, with hyperparameters and gradient norms in device memory.

    Hyperparameters are written once a window, when a backward is about to update weights or at
    ``step()``: a schedule is followed without a lag, and a captured graph reads the same memory.

    Attributes:
        all: the parameters in the order of the groups.
        labels: what errors and tables call them.
        slots: what a step of each reads and writes.
    """

    def __init__(self, rule: Rule, groups: list[dict], state, labels: dict[Tensor, str]):
        self._rule = rule
        self._groups = groups
        self._state = state
        self.labels = labels
        self.all = [p for group in groups for p in group["params"]]
        self.slots: dict[Tensor, Slot] = {}
        self._tables: dict[torch.device, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._open = False
        self._versions: dict[Tensor, int] = {}
        members: dict[torch.device, list[Tensor]] = {}
        for p in self.all:
            members.setdefault(p.device, []).append(p)
        for device, params in members.items():
            scalars = torch.zeros(len(params), rule.n_scalars, device=device)
            norms = torch.zeros(len(params), device=device)
            self._tables[device] = (params, scalars, norms)
            for index, p in enumerate(params):
                states = tuple(state[p][name] for name in rule.states)
                self.slots[p] = Slot(rule, p, states, scalars[index], state[p].get("master"), norms[index], labels[p])
        self.close_window()

    def open_window(self) -> None:
        """Writes the scalars of every parameter's next update, and empties the norms."""
        if self._open:
            return
        self._open = True
        group_of = {p: index for index, group in enumerate(self._groups) for p in group["params"]}
        rows: dict[tuple[int, int], tuple[float, ...]] = {}
        for params, scalars, norms in self._tables.values():
            table = []
            for p in params:
                key = group_of[p], int(self._state[p]["step"]) + 1
                if key not in rows:
                    rows[key] = self._rule.scalars(self._groups[key[0]], key[1])
                table.append(rows[key])
            scalars.copy_(torch.tensor(table, dtype=torch.float32), non_blocking=True)
            norms.zero_()
        self._refresh_masters()

    def close_window(self) -> None:
        self._open = False
        self._versions = {p: p._version for p, slot in self.slots.items() if slot.master is not None}

    @torch.no_grad()
    def _refresh_masters(self) -> None:
        """A weight that was written since the last step (a loaded checkpoint) gives its master the new value."""
        for p, version in self._versions.items():
            if p._version != version:
                master = self.slots[p].master
                master.copy_(torch.where(master.to(p.dtype) == p, master, p.float()))

    def norms_sq(self) -> Tensor:
        """Σ g² of each parameter, fp32 ``[parameters]``, in the order of the groups, on the first device."""
        if len(self._tables) == 1:
            ((_, _, norms),) = self._tables.values()
            return norms.clone()
        return torch.stack([self.slots[p].norm_sq.to(self.all[0].device) for p in self.all])

    def by_device(self, params: Iterable[Tensor]) -> dict[torch.device, list[Slot]]:
        slots: dict[torch.device, list[Slot]] = {}
        for p in params:
            slots.setdefault(p.device, []).append(self.slots[p])
        return slots
