"""The sink for gradients of which every data-parallel rank has a part: reduced bucket by bucket, stepped on arrival.

The order in which gradients go into buckets is fixed, from the last layer to the first, and the same on every
rank. A gradient that is complete before its turn keeps its factors until then. When the window's first backward ends,
what has not come is zero, and a flag in the bucket tells whether any rank had it. Everything else (what waits, a second
backward, ``.grad``) is sent after the ranks have met. So ranks whose graphs differ issue the same collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forge_megatron import kernels
from forge_megatron.coordinator.bucket import Bucket, Buckets, Piece, buffer_bytes, cut, extent
from forge_megatron.coordinator.filler import Filler, Gradient
from forge_megatron.coordinator.gradients import LocalGradient, StoredGradient
from forge_megatron.coordinator.held import HeldCuts, HeldPieces
from forge_megatron.coordinator.meeting import meet, waiting_anywhere
from forge_megatron.coordinator.members import Members
from forge_megatron.coordinator.pending import Pending
from forge_megatron.coordinator.pipeline import Pipeline, Route
from forge_megatron.coordinator.ranks import Ranks
from forge_megatron.coordinator.window import Client, Window
from forge_megatron.kernels import FormedRows, GroupedRows
from forge_megatron.linear import OwnedWeight
from forge_megatron.rules import Rule
from forge_megatron.rules.whole import WHOLE, Whole


class PartialSums(Members):
    """Base of the schedules over data-parallel ranks: order, buckets, agreement; they add what a bucket goes through.

    Args:
        ranks: the members of the group.
        options: of the buckets.
        backend: of the kernels.
        client: the optimizer, weakly held.
        waits: everything is summed in ``step()``.
        scale: of every gradient.
    """

    #: Stretches of a bucket, and whether weights are gathered in it.
    parts = 1
    gathered = False

    def __init__(self, ranks: Ranks, options: Buckets, backend: str, client: Client, *, waits: bool, scale: float):
        super().__init__(ranks, options, client, waits=waits)
        self.backend = backend
        self._scale = scale / len(ranks.members) if options.average else scale
        self._mean: Tensor | None = None
        self._pipeline: Pipeline | None = None
        self._pipeline_for = 0
        self._late: set[Tensor] = set()
        self._window = Window()
        self._filler: Filler | None = None
        self._held = HeldPieces()
        self._cuts = HeldCuts()

    # ---- what a schedule adds

    def route(self, bucket: Bucket, buffer: Tensor, multiplier: Tensor | None) -> Route:
        """Sums a filled bucket over the ranks and steps its weights."""
        raise NotImplementedError

    def route_kept(self, bucket: Bucket, buffer: Tensor) -> Route:
        """Sums a filled bucket and keeps this rank's part of it, with its norms, in the window."""
        raise NotImplementedError

    def route_from_kept(self, bucket: Bucket, mine: Tensor, buffer: Tensor, multiplier: Tensor | None) -> Route:
        """Steps the weights of a bucket whose sum was kept."""
        raise NotImplementedError

    def rows(self, p: Tensor) -> slice:
        """The rows of a parameter that this rank steps, and whose states it has."""
        return slice(0, extent(p))

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank steps of a parameter, or of a tensor of its shape."""
        return tensor

    def whole(self, p: Tensor, of: Whole) -> Whole:
        """The weight of which this rank's part of ``p`` is a part; ``p`` itself is the part of it that ``of`` says."""
        return of

    # ---- the sink

    def accepts(self, owned: OwnedWeight, dy: Tensor | FormedRows | GroupedRows) -> bool:
        """It is this weight's turn: its factors are read during the call and not kept.

        Rows that are formed anew wait for the next weight, for they give the input its gradient first, from all rows
        as they were.
        """
        return not isinstance(dy, FormedRows) and self._in_backward().next_param is owned.weight

    def __call__(self, owned: OwnedWeight, segments: Sequence[kernels.Segment]) -> None:
        self._arrive(owned)
        self._advance(LocalGradient(owned, segments, self.backend))

    def begin(self, waiting: Collection[Tensor]) -> None:
        """Once a window, before a rank completes a gradient, it tells the others what it keeps to ``step()``.

        Such a weight, which a further graph of its own may read, no rank may step yet. They are waited for where a rank
        fills its first bucket.
        """
        if self._window.waiting is None:
            self._window.waiting = waiting_anywhere(self.ranks, self._client(), waiting)

    def _kept_here(self) -> set[Tensor]:
        """The weights of which this rank keeps a part to ``step()``."""
        return {p for p, owned in self._client().owned.items() if owned.factors} - self._window.arrived

    def hold(self, owned: OwnedWeight) -> None:
        """Complete, but not its turn: its factors are kept."""
        self._in_backward()
        self._arrive(owned)

    def finish(self) -> None:
        """Backward has ended: what any rank has completed in it is stepped, so that others may compute with it."""
        with torch.no_grad():
            if self._window.passed:
                self._meet(set(), self._client().shared_facts(), at_step=False, measures=False)
            else:
                self._pass()

    def abandon(self) -> Collection[Tensor]:
        """A bucket is stepped by no rank before all have sent it: what was not sent is unchanged everywhere."""
        window = self._window
        sent = set() if self._filler is None else self._filler.sent
        for p in window.arrived - sent - window.done:
            self._client().owned[p].updated = False
        return sent - window.changed - window.done

    def _pass(self) -> None:
        self.begin(self._kept_here())
        window, filler = self._window, self._in_backward()
        route = partial(self.route, multiplier=None)
        filler.advance(self.pipeline, route, window.arrived, closing=True, everything=True)
        self.pipeline.drain()
        window.passed = True
        window.done |= window.stepping & filler.params

    def learn(self, bucket: Bucket, part: Tensor) -> None:
        """After the sum: which of the gradients that this rank does not have others had."""
        known = self._window.stepping
        if all(piece.param in known for piece in bucket.pieces):
            return
        for piece, there in zip(bucket.pieces, bucket.marked(part), strict=True):
            if there and piece.param not in known:
                known.add(piece.param)
                self._mark_stepped(piece.param)

    def _arrive(self, owned: OwnedWeight) -> None:
        self._window.arrived.add(owned.weight)
        self._window.stepping.add(owned.weight)
        # Its version is bumped when its gradient has been formed for the last time, which may read the weight.
        owned.updated, owned.updated_version = True, owned.weight._version

    def _in_backward(self) -> Filler:
        """Of the weights whose gradients backward completes, in the order in which it is expected to."""
        if self._filler is None:
            apart = self._late | self._window.waiting()
            self._filler = self._fill([p for p in reversed(self._client().owned) if p not in apart])
        return self._filler

    def _advance(self, in_hand: Gradient) -> None:
        self._filler.advance(self.pipeline, partial(self.route, multiplier=None), self._window.arrived, in_hand)

    # ---- buckets

    def expect_storable(self, label: str, rule: Rule, shape: torch.Size) -> None:
        """Raises ``NotImplementedError`` for a parameter of ``shape`` that this schedule cannot step by ``rule``."""

    def _fill(self, params: Sequence[Tensor]) -> Filler:
        return Filler(self._cut(params), self.parts, self._gradient, self._written)

    def _cut(self, params: Sequence[Tensor]) -> list[Bucket]:
        return self._cuts.of(params, lambda: cut(params, self.options, self.parts, **self._layout()))

    def pieces(self) -> int:
        """Of all parameters in their buckets."""
        return sum(len(bucket.pieces) for bucket in self._cut(list(self._client().names)))

    def _layout(self) -> dict[str, Any]:
        client = self._client()
        uncut = {p for p in client.names if client.reads_whole(p)}
        return {"multiple": self.ranks.size, "gathered": self.gathered, "uncut": uncut}

    def _gradient(self, p: Tensor) -> Gradient:
        owned = self._client().owned.get(p)
        if owned is not None and owned.factors:
            return LocalGradient(owned, None, self.backend)
        return StoredGradient(p.grad)

    def _written(self, p: Tensor) -> None:
        owned = self._client().owned.get(p)
        if owned is not None:
            owned.factors.clear()
            if p in self._window.arrived:
                owned.mark_updated()

    @property
    def device(self) -> torch.device:
        return next(iter(self._client().names)).device

    @property
    def pipeline(self) -> Pipeline:
        names = self._client().names
        if self._pipeline is None or self._pipeline_for != len(names):
            # What a group that has joined needs may be more.
            self._pipeline = Pipeline(*self._memory(list(names)), self.device, self.ranks.wait)
            # They remember places in the buffers that were.
            self._cuts = HeldCuts()
            self._pipeline_for = len(names)
        return self._pipeline

    def _memory(self, params: list[Tensor]) -> tuple[int, int]:
        nbytes = buffer_bytes(params, self.options, self.parts, **self._layout())
        return nbytes, max(1, min(self.options.count, len(self._cut(params))))

    def held_bytes(self, *, sums: bool) -> int:
        """What this rank holds beside weights and states: the buffers, and where they wait for a norm its sums."""
        params = list(self._client().names)
        nbytes, count = self._memory(params)
        lengths = [b.length * self.parts // self.ranks.size * b.dtype.itemsize for b in self._cut(params)]
        return nbytes * count + (sum(lengths) if sums else 0)

    def mean(self) -> Tensor | None:
        """What every sum is multiplied by in its step, 0-dim fp32; None: nothing."""
        if self._mean is None and self._scale != 1.0:
            self._mean = torch.full((), self._scale, dtype=torch.float32, device=self.device)
        return self._mean

    def step_pieces(
        self, bucket: Bucket, stretch: Tensor, rank: int, multiplier: Tensor | None, *, with_norms: bool = True
    ) -> None:
        """One launch for all pieces in one part of a summed bucket, which scales the sums too, in fp32.

        Args:
            multiplier: of every gradient, 0-dim; or of each parameter's, in the order of the optimizer's.
        """
        if (mean := self.mean()) is not None:
            multiplier = mean if multiplier is None else multiplier * mean
        slots, grads = [], []
        each = None
        if multiplier is not None and multiplier.dim() == 1:
            each = dict(zip(self._client().names, multiplier.unbind(), strict=True))
        for piece in self.stepped(bucket):
            rows = piece.rows(self.parts, rank)
            slot = self.slot(piece.param)
            # A rank without rows takes part in what the others ask about the whole.
            if rows.stop == rows.start and slot.whole is WHOLE:
                continue
            self._window.changed.add(piece.param)
            slots.append(self._held.slot(slot, piece, rows, self.norm_of(piece) if with_norms else None))
            grad = piece.view(stretch, rows)
            grads.append(grad if each is None else grad.float() * each[piece.param])
        common = multiplier if each is None else None
        kernels.step(slots, grads, multiplier=common, backend=self.backend)

    def stepped(self, bucket: Bucket) -> list[Piece]:
        """The pieces of weights that any rank has a gradient of."""
        return [piece for piece in bucket.pieces if piece.param in self._window.stepping]

    def keep(self, bucket: Bucket, mine: Tensor) -> None:
        """Keeps this rank's part of a summed bucket to the end of the window."""
        self._window.kept.append((bucket, mine.clone()))

    def norm_of(self, piece: Piece, dtype: torch.dtype = torch.float32) -> Tensor:
        """Where Σ g² of a piece of this window goes, 0-dim."""
        norm = self._held.norm(piece, dtype)
        self._window.norms.setdefault(piece.param, []).append(norm)
        return norm

    # ---- where the ranks meet

    def agree(self, pending: Pending, facts: dict[str, object], *, measures: bool, again: bool) -> Pending:
        """Learns what the ranks have gradients of; the first thing of a ``step()`` that others can see.

        Args:
            pending: this rank's own gradients.
            facts: what must be equal on every rank.
            measures: norms are needed before the first step.
            again: compare the facts also where the ranks have met in this window for its norms.

        Returns:
            Those whose sums DistributedDataParallel has left in ``.grad``.

        Raises:
            ValueError: a fact differs; nothing has changed then, except what backward has stepped.
            RuntimeError: a rank did not come.
        """
        self.expect_reduced()
        if self._window.agreed is None:
            if not (self._window.passed or self._waits):
                self._pass()
            self._meet(pending.params() - self.reduced_elsewhere, facts, at_step=True, measures=measures)
        elif again:
            self.ranks.agree("step() after the norms", facts)
        reduced = {
            device: mine
            for device, slots in pending.ordinary.items()
            if (mine := [slot for slot in slots if slot.weight in self.reduced_elsewhere])
        }
        return replace(pending, waiting=(), ordinary=reduced)

    def _meet(self, pending: set[Tensor], facts: dict[str, object], **where: bool) -> None:
        """At the end of a backward, or in ``step()``, where a rank stays until every rank is there."""
        window, told = self._window, {"pending": pending, "facts": facts, **where}
        while True:
            met = meet(self.ranks, self._client().names, window, held=self._kept_here(), **told)
            if met.at_step:
                window.agreed, self._late = met.present | window.done, met.missed
                return
            self._flush(met.arrived - window.done - met.held, None)
            if not where["at_step"]:
                return

    def _flush(self, ready: set[Tensor], multiplier: Tensor | None) -> None:
        """Steps ``ready``, of which any rank has a gradient; this rank's part of the others is zero."""
        window = self._window
        window.stepping |= ready
        route = partial(self.route, multiplier=multiplier)
        self._fill(self._in_order(ready)).advance(self.pipeline, route, ready, closing=True)
        self.pipeline.drain()
        window.done |= ready
        for p in ready - window.arrived:
            self._mark_stepped(p)

    def keep_sums(self) -> None:
        """Sums what backward has not stepped and keeps this rank's part: a norm comes before the first step of it."""
        window = self._window
        if window.kept is None:
            window.kept = []
            window.stepping |= window.agreed
            left = window.agreed - window.done
            filler = self._fill(self._in_order(left))
            filler.advance(self.pipeline, self.route_kept, left, closing=True)
            self.pipeline.drain()
            self._close_norms(partial=True)

    def step_all(self, multiplier: Tensor | None) -> set[Tensor]:
        """Steps everything that the ranks have agreed on and backward has not; returns all that this window steps."""
        window = self._window
        if window.kept is None:
            self._flush(window.agreed - window.done, multiplier)
            self._close_norms(partial=self.parts > 1)
            return window.agreed
        for bucket, mine in window.kept:
            buffer = self.pipeline.take()
            self.pipeline.launch(self.route_from_kept(bucket, mine, buffer, multiplier), buffer)
        self.pipeline.drain()
        for p in window.agreed - window.arrived:
            self._mark_stepped(p)
        return window.agreed

    def slot(self, p: Tensor) -> kernels.Slot:
        return self._client().slot(p)

    def _mark_stepped(self, p: Tensor) -> None:
        """A forward with the old weight must not be followed by a backward."""
        owned = self._client().owned.get(p)
        if owned is None:
            torch.autograd.graph.increment_version(p)
        else:
            owned.mark_updated()

    def _in_order(self, params: set[Tensor]) -> list[Tensor]:
        client = self._client()
        owned = [p for p in reversed(client.owned) if p in params]
        return owned + [p for p in reversed(client.names) if p in params and p not in client.owned]

    def _close_norms(self, *, partial: bool) -> None:
        """Gives each parameter its Σ g², and where each rank has some pieces of it that of all ranks."""
        stepped = [p for p in self._client().names if p in self._window.agreed]
        total = self._window.norms_sq(stepped, self.device) * self._scale**2
        if partial and stepped:
            if self.parts == 1 and self.ranks.rank > 0:
                # What backward stepped was measured whole on every rank.
                total *= kernels.upload(torch.tensor([p not in self._window.done for p in stepped]), self.device)
            self.ranks.sum_now(total)
        if stepped:
            torch._foreach_copy_([self.slot(p).norm_sq for p in stepped], total.unbind())
        self._window.norms.clear()

    def close_window(self) -> None:
        """After ``step()``; the next layout follows what backward completed on every rank in this one."""
        self._window = Window()
        self._filler = None

    def drop(self) -> None:
        """After a failure, or ``zero_grad()``: whatever is under way belongs to nobody."""
        if self._pipeline is not None:
            self._pipeline.drop()
        self.close_window()
