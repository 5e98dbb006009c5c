"""Recording of CUDA graphs, after which torch is as it was also where a recording fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph,
    pool: tuple[int, int],
    stream: torch.cuda.Stream,
    generators: Iterable[torch.Generator] = (),
) -> Iterator[None]:
    """Inside, what is launched is recorded in ``graph``, on ``stream``.

    Args:
        pool: which the graph's memory is of.
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
            with _capture(graph, stream, pool):
                yield
        except BaseException:
            _clear(pool, stream, generators)
            raise


def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: tuple[int, int] | None = None):
    # Other threads pin memory and ask NCCL's events meanwhile, which would end a capture of the whole process.
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


def _clear(pool: tuple[int, int], stream: torch.cuda.Stream, generators: tuple[torch.Generator, ...]) -> None:
    """End what torch only ends with a capture that succeeds: allocations for the pool, and draws for the graph.

    Otherwise no later graph could be of this pool, and ``torch.rand`` on the device would raise.
    """
    with suppress(RuntimeError):
        # It raises where the failure came after these had ended.
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    succeeds = torch.cuda.CUDAGraph()
    for generator in generators:
        succeeds.register_generator_state(generator)
    with suppress(RuntimeError), _capture(succeeds, stream):
        torch.zeros((), device=stream.device)
