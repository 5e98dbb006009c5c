"""Ranks that are threads of this process: the two collectives of ``forge_megatron.coordinator.parts``, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

#: Seconds that a rank waits for the others.
PATIENCE = 20


class ThreadRanks:
    """Stands in for ``torch.distributed`` in a module whose functions are run by :meth:`run`.

    Args:
        world: how many threads.
    """

    ReduceOp = dist.ReduceOp

    def __init__(self, world: int):
        self._barrier = threading.Barrier(world)
        self._sent: list[Tensor] = [torch.empty(0)] * world
        self._mine = threading.local()
        self.world = world

    def run(self, function: Callable[[int], object]) -> list:
        """``function`` of each rank, at the same time; what they returned."""

        def ranked(rank: int):
            self._mine.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            return [ended.result() for ended in [pool.submit(ranked, rank) for rank in range(self.world)]]

    def _exchanged(self, tensor: Tensor) -> list[Tensor]:
        """What every rank has sent, in their order."""
        self._sent[self._mine.rank] = tensor.clone()
        self._barrier.wait(PATIENCE)
        received = list(self._sent)
        self._barrier.wait(PATIENCE)
        return received

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, group=None) -> None:
        received = torch.stack(self._exchanged(tensor))
        tensor.copy_(received.sum(0) if op == dist.ReduceOp.SUM else received.amax(0))

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, group=None) -> None:
        out.copy_(torch.cat(self._exchanged(tensor)))
