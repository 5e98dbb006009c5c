"""ZeRO: weights on every rank, states and masters on one. A bucket is reduce-scattered, each rank steps its rows,
and the weights are gathered in the same buffer.

A rank holds the rows of a weight that ``torch.chunk`` and DTensor's ``Shard(0)`` give it, and of a vector whole blocks
of 64, so that neither a state's shape nor a scale depends on the size of a bucket. Ranks beyond the rows of a small
weight hold nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forge_megatron.coordinator.bucket import Bucket, Buckets, part_rows, rows_of
from forge_megatron.coordinator.gathered import copy, in_buffer
from forge_megatron.coordinator.partial import PartialSums
from forge_megatron.coordinator.parts import Part, PartOfPart
from forge_megatron.coordinator.pipeline import Route
from forge_megatron.coordinator.ranks import Ranks
from forge_megatron.coordinator.window import Client
from forge_megatron.formats.code import as_bytes, scale_rows
from forge_megatron.formats.state import is_scale, scale_name
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole


class ShardedStates(PartialSums):
    """ZeRO-2's schedule; where no gradient is resident, stages 1 and 2 are one."""

    gathered = True

    def __init__(self, ranks: Ranks, options: Buckets, backend: str, client: Client, *, waits: bool, scale: float):
        super().__init__(ranks, options, backend, client, waits=waits, scale=scale)
        self.parts = ranks.size

    def rows(self, p: Tensor) -> slice:
        return part_rows(p, self.parts, self.ranks.rank)

    def local(self, tensor: Tensor) -> Tensor:
        return rows_of(tensor, self.rows(tensor))

    def whole(self, p: Tensor, of: Whole) -> Whole:
        stretches = ((rows.start, rows.stop) for rows in (part_rows(p, self.parts, rank) for rank in range(self.parts)))
        part = Part(
            p.shape,
            0,
            tuple((stretch,) for stretch in stretches),
            self.ranks.rank,
            self.ranks.group,
            self.ranks.guarded,
        )
        return part if of is WHOLE else PartOfPart(of, part)

    def expect_storable(self, label: str, rule: Rule, shape: torch.Size) -> None:
        if rule.regime != "fused" and not shape:
            raise NotImplementedError(
                f"{label}: {rule.name} of a 0-dim parameter with sharding='states' is not built; give its group a rule "
                "such as adamw, or the parameter a shape of (1,)"
            )

    def enter_wrapper(self, wrapper) -> frozenset[Tensor]:
        raise NotImplementedError(
            "sharding='states' inside DistributedDataParallel: it reduces whole gradients, of which a rank needs its "
            "rows; call the model without the wrapper, attach(process_group=...) reduces all of its gradients"
        )

    def route(self, bucket: Bucket, buffer: Tensor, multiplier: Tensor | None) -> Route:
        elements = bucket.elements(buffer, self.parts, bucket.dtype)
        yield from self.ranks.reduce_scatter(elements)
        self.learn(bucket, self.ranks.part(elements))
        self.step_pieces(bucket, self.ranks.part(elements), self.ranks.rank, multiplier)
        yield from self._gather_weights(bucket, buffer)

    def route_kept(self, bucket: Bucket, buffer: Tensor) -> Route:
        elements = bucket.elements(buffer, self.parts, bucket.dtype)
        yield from self.ranks.reduce_scatter(elements)
        mine = self.ranks.part(elements)
        self.keep(bucket, mine)
        for piece in self.stepped(bucket):
            here = piece.view(mine, piece.rows(self.parts, self.ranks.rank))
            self.norm_of(piece, torch.float64).copy_(torch.linalg.vector_norm(here, dtype=torch.float64).square())

    def route_from_kept(self, bucket: Bucket, mine: Tensor, buffer: Tensor, multiplier: Tensor | None) -> Route:
        self.step_pieces(bucket, mine, self.ranks.rank, multiplier, with_norms=False)
        yield from self._gather_weights(bucket, buffer)

    def label_states(self, state_dict: dict, params: Mapping[int, Tensor], *, full: bool) -> None:
        """Makes the states in ``state_dict`` whole, or says whose rows they are.

        Args:
            state_dict: ``torch.optim``'s; its entries are replaced.
            params: the parameter of each key of its states.
            full: gather them on every rank.

        Raises:
            ValueError: a parameter has states on some ranks only; nothing has been gathered then.
        """
        if not full:
            state_dict["forge"]["shard"] = {"rank": self.ranks.rank, "of": self.ranks.size}
            return
        names = self._client().names
        having = {"parameters with states": [names[params[key]] for key in state_dict["state"]]}
        self.ranks.agree("state_dict(full=True)", having)
        for key, entry in state_dict["state"].items():
            states = self.slot(params[key]).rule.states
            # Statistics of a whole weight are on every rank.
            by_rows = entry.keys() & {*states, *map(scale_name, states), "master"}
            whole = {name: self._joined(params[key], name, entry[name]) for name in sorted(by_rows)}
            state_dict["state"][key] = {**entry, **whole}

    def _joined(self, p: Tensor, name: str, mine: Tensor) -> Tensor:
        """A state, or the scales of one, from all ranks' rows."""
        shares = [part_rows(p, self.parts, rank) for rank in range(self.parts)]
        if is_scale(name):
            shares = [scale_rows(p, rows) for rows in shares]
        counts = [rows.stop - rows.start for rows in shares]
        stored = as_bytes(mine)
        gathered = stored.new_zeros(self.parts, max(counts), *mine.shape[1:])
        gathered[self.ranks.rank, : counts[self.ranks.rank]] = stored
        self.ranks.wait(self.ranks.all_gather(gathered.view(-1)))
        whole = torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)]).view(mine.dtype)
        return whole if is_scale(name) else whole.reshape(p.shape)

    def expect_own(self, told: Mapping) -> None:
        """Raises ``ValueError`` if the states, by what their checkpoint has told of them, are another rank's rows."""
        shard = told.get("shard")
        if shard is not None and (shard["rank"], shard["of"]) != (self.ranks.rank, self.ranks.size):
            raise ValueError(
                f"the checkpoint has the states of rank {shard['rank']} of {shard['of']}, and this is rank "
                f"{self.ranks.rank} of {self.ranks.size}; for another number of ranks, or one file of all, "
                "save state_dict(full=True)"
            )

    def _gather_weights(self, bucket: Bucket, buffer: Tensor) -> Route:
        stepped = set(self.stepped(bucket))
        weights, parts = in_buffer(bucket, buffer, self.parts)
        mine, theirs = [], []
        for part, found in enumerate(parts):
            pairs = mine if part == self.ranks.rank else theirs
            pairs += [(there, weight) for piece, there, weight in found if piece in stepped]
        copy(mine)
        yield self.ranks.all_gather(weights.view(-1))
        copy((weight, there) for there, weight in theirs)
