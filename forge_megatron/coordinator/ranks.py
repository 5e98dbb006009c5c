"""The ranks that hold parts of one gradient: their groups, their collectives, and what they agree on.

Two process groups of their own are made from the caller's: one for gradients, so that nobody else's collective
falls between two buckets, and one over gloo for what the hosts tell each other, which needs no device and
ends in an error where a rank does not come.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from forge_megatron.coordinator.alike import expect_alike
from forge_megatron.coordinator.groups import own_group
from forge_megatron.coordinator.pipeline import Work

#: Seconds that a rank which has waited in vain gives the others to say that they have, too.
_GRACE = 5.0


class Ranks:
    """The members of a data-parallel group, which are one instance or several of equal size.

    An instance is what has all shards of the states once. Without ``shard_group`` all members are one.

    Attributes:
        members: all of them, by their global ranks.
        size, rank: of this rank's instance, and in it.
        group: of the instance, for gradients.
        instance: this rank's, from 0.
        room: marks that every :meth:`agree` has room for: ranks at different points of their programs then send
            messages of one length, and learn it.

    Args:
        group: names the ranks; every one of them makes this object at the same point of its program.
        timeout: seconds after which a rank that the others wait for is an error.
        deterministic: sums are in the order of the ranks, and of the instances.
        shard_group: names the ranks of the instance.

    Raises:
        ValueError: the instances have not all members once, or not equally many.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        deterministic: bool = False,
        shard_group: dist.ProcessGroup | None = None,
    ):
        self.members = dist.get_process_group_ranks(group)
        self.room = 0
        self.timeout = timeout
        self._place = self.members.index(dist.get_rank())
        self._limit = limit = timedelta(seconds=timeout)
        self._deterministic = deterministic
        backend = dist.get_backend(group)
        self._on_device = "nccl" in backend
        self._hosts = own_group(self.members, "hosts", "gloo", limit)
        self._calls = 0
        self._failed: str | None = None
        mine = tuple(self.members if shard_group is None else dist.get_process_group_ranks(shard_group))
        instances = self._instances(mine)
        self.size, self.rank, self.instance = len(mine), mine.index(dist.get_rank()), instances.index(mine)
        # On a device the time is that of the work before it, too, and its end is the process's.
        of_gradients = max(limit, timedelta(minutes=1)) if self._on_device else limit
        self.group = own_group(mine, "gradients", backend, of_gradients)
        same = [instance[self.rank] for instance in instances]
        self._across = own_group(same, "instances", backend, of_gradients) if len(instances) > 1 else None

    def _instances(self, mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        told: list = [None] * len(self.members)
        self._collective("attach(process_group=...)", lambda: dist.all_gather_object(told, mine, group=self._hosts))
        instances = sorted(set(told), key=lambda ranks: self.members.index(ranks[0]))
        if sorted(itertools.chain(*instances)) != sorted(self.members) or len(set(map(len, instances))) > 1:
            raise ValueError(
                f"shard_group=: the ranks {self.members} of process_group= gave {instances}; give each rank one group, "
                "which its ranks have in common, of as many ranks as the others have"
            )
        return instances

    # ---- sums of gradients

    def wait(self, work: Work) -> None:
        """Waits on the host where the transport works there; on a GPU the current stream waits.

        Raises:
            RuntimeError: a rank did not take part within the time limit.
        """
        if self._on_device:
            work.wait()
            return
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            self._missing("a bucket of gradients", error)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a collective that the host waits for by itself: an error names the ranks that did not take part."""
        try:
            yield
        except RuntimeError as error:
            self._missing("what a rule reads of a whole weight", error)

    def all_reduce(self, buffer: Tensor) -> Iterator[Work]:
        """Sums ``buffer`` (a multiple of ``size`` elements where sums are deterministic), in place."""
        if not (self._deterministic and self.size > 2):
            yield dist.all_reduce(buffer, group=self.group, async_op=True)
            return
        yield from self.reduce_scatter(buffer)
        yield self.all_gather(buffer)

    def reduce_scatter(self, buffer: Tensor) -> Iterator[Work]:
        """Sums this rank's part of ``buffer``, one of ``size`` equal stretches, in place; spoils the others.

        Over the ranks of the instance, then over the instances, of which each has the same sum.
        """
        mine = self.part(buffer)
        if self._deterministic and self.size > 2:
            received = torch.empty_like(buffer)
            yield dist.all_to_all_single(received, buffer, group=self.group, async_op=True)
            mine.copy_(_in_order(received.view(self.size, -1)))
        else:
            yield dist.reduce_scatter_tensor(mine, buffer, group=self.group, async_op=True)
        if self._across is None:
            return
        if self._deterministic and self._across.size() > 2:
            received = mine.new_empty(self._across.size(), len(mine))
            yield dist.all_gather_into_tensor(received.view(-1), mine, group=self._across, async_op=True)
            mine.copy_(_in_order(received))
        else:
            yield dist.all_reduce(mine, group=self._across, async_op=True)

    def all_gather(self, buffer: Tensor) -> Work:
        """Fills ``buffer`` from each rank's own part of it, in each instance by itself."""
        return dist.all_gather_into_tensor(buffer, self.part(buffer), group=self.group, async_op=True)

    def part(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.size, -1)[self.rank]

    def sum_now(self, tensor: Tensor) -> None:
        """Sums a small tensor over the instance in place, at once."""
        self.wait(dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Gives every rank the first rank's values, of any dtype, strides and device."""
        for tensor in tensors:
            if tensor.is_meta:
                continue
            # What lies in memory once, of a tensor that was expanded.
            there = tensor.detach()[tuple(slice(None) if stride else slice(1) for stride in tensor.stride())]
            sent = there.contiguous().view(-1).view(torch.uint8)
            for group in (self._hosts,) if tensor.device.type == "cpu" else (self._across, self.group):
                if group is not None:
                    self.wait(dist.broadcast(sent, group=group, group_src=0, async_op=True))
            if sent.data_ptr() != there.data_ptr():
                there.copy_(sent.view(there.dtype).view(there.shape))

    # ---- what the hosts tell each other

    def expect_alike(self, what: str, facts: dict[str, object]) -> None:
        """Compares ``facts`` over the ranks.

        Raises:
            Disagreement: on every rank, naming the first fact that differs and the ranks' values.
        """
        everywhere: list = [None] * len(self.members)
        self._collective(what, lambda: dist.all_gather_object(everywhere, facts, group=self._hosts))
        expect_alike(what, everywhere, self.members)

    def agree(self, what: str, facts: dict[str, object], marks: Tensor | None = None) -> None:
        """Takes the largest of every rank's ``marks`` (uint8, in place), if their ``facts`` are equal.

        One small collective; the values are exchanged only where they differ.

        Raises:
            ValueError: the facts differ; nothing has changed then.
            RuntimeError: a rank did not come.
        """
        self.agree_later(what, facts, torch.zeros(0, dtype=torch.uint8) if marks is None else marks)()

    def agree_later(self, what: str, facts: dict[str, object], marks: Tensor) -> Callable[[], None]:
        """The first half of :meth:`agree`; nothing else may be agreed on before the second, which it returns."""
        self._calls += 1
        digest = zlib.crc32(repr((what, len(marks), *facts.values())).encode())
        told = torch.zeros(2 + max(self.room, len(marks)), dtype=torch.int64)
        told[0], told[1], told[2 : 2 + len(marks)] = digest, -digest, marks
        work = self._collective(
            what, lambda: dist.all_reduce(told, dist.ReduceOp.MAX, group=self._hosts, async_op=True)
        )

        def agreed() -> None:
            self._collective(what, lambda: work.wait(self._limit))
            if told[0] != -told[1]:
                self.expect_alike(what, {"what is called": what, "number of parameters": len(marks), **facts})
            marks.copy_(told[2 : 2 + len(marks)])

        return agreed

    def _collective(self, what: str, call):
        if self._failed is not None:
            raise RuntimeError(self._failed)
        try:
            return call()
        except RuntimeError as error:
            self._missing(what, error)

    def _missing(self, what: str, error: RuntimeError) -> None:
        """Raises; names the ranks that do not say within a few seconds that they wait in vain, too."""
        store = dist.distributed_c10d._get_default_store()
        key = f"{self._hosts.group_name}/{self._calls}"  # not another optimizer's of these ranks
        store.set(f"{key}/{self._place}", b"waits")
        silent = list(range(len(self.members)))
        end = time.monotonic() + min(_GRACE, self.timeout)
        while silent and time.monotonic() < end:
            silent = [rank for rank in silent if not store.check([f"{key}/{rank}"])]
            time.sleep(0.05)
        names = ", ".join(str(self.members[rank]) for rank in silent) or "none of them: the network failed"
        self._failed = (
            f"{what}: not every rank of {self.members} took part within {self.timeout:g} s; without a sign: rank "
            f"{names}. Every rank must run as many steps as the others, of its optimizers in one order, and end "
            "backward in step(): give a rank whose data has ended an empty batch or stop all of them together, and "
            "look for an error on the silent rank"
        )
        raise RuntimeError(self._failed) from error


def _in_order(terms: Tensor) -> Tensor:
    """The sum of ``terms``, ``[ranks, elements]``, in fp32."""
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total
