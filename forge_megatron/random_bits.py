"""The random bits of one optimizer's weights that are rounded stochastically: one table a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forge_megatron.formats import Fp8Weight, Noise, Origin, resolve_group
from forge_megatron.formats.noise import WORDS, columns_of, words
from forge_megatron.kernels import local, origin_of, write_table


class RandomBits:
    """Gives each such weight a :class:`Noise`, whose key is written in device memory once a window.

    Args:
        seed: of the run; every rank and every resumed run has the same.
        origins: the place of a parameter in the whole weight, where it is a part or has another name than its label.
            A DTensor knows its own.
    """

    def __init__(self, seed: int, origins: Mapping[Tensor, Origin] | None = None):
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r} is not a whole number")
        self.seed = seed
        self._origins = dict(origins or {})
        self._noise: dict[Tensor, Noise] = {}
        self._tables: dict[torch.device, tuple[list[Tensor], Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._noise)

    def place(self, labels: Mapping[Tensor, str], groups: Mapping[Tensor, Mapping], formats: Mapping) -> None:
        """Makes the tables of those parameters that are rounded stochastically, anew.

        Args:
            labels: every parameter's name.
            groups: every parameter's group.
            formats: those of the groups that give none.

        Raises:
            ValueError: two of them would have the same bits.
        """
        self._noise.clear()
        self._tables.clear()
        members: dict[torch.device, list[Tensor]] = {}
        taken: dict[Origin, str] = {}
        for p, label in labels.items():
            rounded = p.dtype is torch.bfloat16 or isinstance(p, Fp8Weight)
            if not rounded or not resolve_group(p.dtype, groups[p], formats)[1].stochastic:
                continue
            origin = self._origins.setdefault(p, origin_of(label, p))
            if taken.setdefault(origin, label) != label:
                raise ValueError(f"{label} and {taken[origin]} are both {origin}: their roundings would be equal")
            members.setdefault(p.device, []).append(p)
        for device, params in members.items():
            table = torch.zeros(len(params), WORDS, dtype=torch.int64, device=device)
            self._tables[device] = (params, table)
            for p, row in zip(params, table.unbind(), strict=True):
                origin = self._origins[p]
                self._noise[p] = Noise(row, origin, columns_of(local(p).shape, origin))

    def of(self, p: Tensor) -> Noise | None:
        """The bits of ``p``; None if it is not rounded stochastically."""
        return self._noise.get(p)

    def write(self, steps: Mapping[Tensor, int]) -> None:
        """Writes the keys of the updates ``steps``, counted from 1."""
        for params, table in self._tables.values():
            rows = [words(n.origin, n.columns, self.seed, steps[p]) for p, n in ((p, self._noise[p]) for p in params)]
            write_table(table, torch.tensor(rows, dtype=torch.int64))
