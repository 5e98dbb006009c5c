"""Recording of CUDA graphs, after which torch is as it was also where a recording fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

# Of captures that failed: torch still asks them whether what is allocated is theirs.
_failed: list[torch.cuda.CUDAGraph] = []


class GraphMemory:
    """Memory that graphs share, of which no two are replayed at once.

    Attributes:
        pools: of the caching allocator; the last is that of graphs to come.
    """

    def __init__(self):
        self.pools = [torch.cuda.graph_pool_handle()]

    @contextmanager
    def recorded(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, generators: Iterable[torch.Generator] = ()
    ) -> Iterator[None]:
        """Inside, what is launched is recorded in ``graph``, on ``stream``.

        Args:
            generators: of random numbers that are drawn from besides the device's own.

        Raises:
            RuntimeError: something inside cannot be recorded. Then nothing of it has run.
        """
        generators = tuple(generators)
        for generator in generators:
            graph.register_generator_state(generator)
        # A capture that fails leaves its own stream the current one.
        with torch.cuda.stream(torch.cuda.current_stream(stream.device)):
            try:
                with _capture(graph, stream, self.pools[-1]):
                    yield
            except BaseException:
                self._clear(graph, stream, generators)
                raise

    def _clear(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, generators: tuple[torch.Generator, ...]
    ) -> None:
        """End what torch ends only with a capture that succeeds: allocations for the pool, and draws for the graph.

        Otherwise ``torch.rand`` on the device would raise, and so would the next capture: the allocator of pinned
        memory takes each pool for one capture at a time, and cannot be told that this one is over.
        """
        _failed.append(graph)
        with suppress(RuntimeError):
            # It raises where the failure came after these had ended.
            torch._C._cuda_endAllocateToPool(stream.device.index, self.pools[-1])
        self.pools.append(torch.cuda.graph_pool_handle())
        succeeds = torch.cuda.CUDAGraph()
        for generator in generators:
            succeeds.register_generator_state(generator)
        with suppress(RuntimeError), _capture(succeeds, stream):
            torch.zeros((), device=stream.device)


def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: tuple[int, int] | None = None):
    # Other threads pin memory and ask NCCL's events meanwhile, which would end a capture of the whole process.
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
