"""Matrix stages as CUDA graphs: launching Newton-Schulz takes the host longer than a small matrix takes the device.

On each stream there is one scratch, in which an epilogue leaves its matrices and from which apply reads their
direction, and for each shape a graph of what turns the one into the other. All layers share both: nothing of a
layer is in a graph but its shape, and the kernels in it are those that it replaces, so the bits are the same.

The first matrix of a kind runs as it is (kernels are loaded, cuBLAS makes its handle), the second is captured. A
capture that is under way, a weight of which other ranks have parts, and matrices of more than ``most_elements`` run as
they are, in a scratch of the caching allocator's; so does whatever cannot be captured, which is said once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..rules.stages import Stages
from ..rules.whole import WHOLE, Whole
from .backend import resolve_backend
from .recording import GraphMemory
from .slot import Slot
from .uploads import is_capturing

#: Elements of the largest scratch; 0 switches graphs off. One of 2^22 is 16 MiB, and its graphs take twice as much: of
#: larger matrices the device has more to do than the host.
most_elements = 1 << 22

#: Graphs of one stream: stacks may come in any number of matrices.
MOST_GRAPHS = 64

# By device and stream; the slots keep them alive.
_known: weakref.WeakValueDictionary[tuple[int, int], Replays] = weakref.WeakValueDictionary()
# Streams on which whole steps are captured, after steps that run as they are: a graph in them would be left behind.
_left_out: set[tuple[int, int]] = set()


class Replays(Whole):
    """The scratch and the graphs of one stream: as a whole weight, whose transforms are replayed.

    Attributes:
        lock: held from the epilogue's launch to apply's, for another thread may launch on the same stream.
    """

    def __init__(self, device: torch.device, stream: int):
        self.lock = threading.Lock()
        self.device, self.stream = device, stream
        self._beside = torch.cuda.Stream(device)
        self._graph_memory = GraphMemory()
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._views: dict[tuple[int, ...], Tensor] = {}
        self._graphs: dict[tuple, Callable[[], None] | None] = {}

    def scratch(self, shape: tuple[int, ...]) -> Tensor:
        """fp32 of ``shape``, contiguous, in the one scratch; what it holds is for whoever has the lock."""
        view = self._views.get(shape)
        if view is None:
            size = torch.Size(shape).numel()
            if size > self._memory.numel():
                # The graphs read the smaller one, which the device may not have finished with.
                torch.cuda.current_stream(self.device).synchronize()
                self._graphs.clear()
                self._views.clear()
                self._memory = torch.empty(size, dtype=torch.float32, device=self.device)
            view = self._views[shape] = self._memory[:size].view(shape)
        return view

    def transform(self, u: Tensor, function: Callable[[Tensor], Tensor], reads: torch.dtype) -> Tensor:
        """As the base class's; what lies in the scratch is written in place."""
        offset = u.data_ptr() - self._memory.data_ptr()
        if not (0 <= offset < self._memory.nbytes and u.is_contiguous()):
            return function(u)
        rounding = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        key = function, u.shape, offset, rounding
        if key not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                torch.cuda.current_stream(self.device).synchronize()
                self._graphs.clear()
            self._graphs[key] = None
            return function(u)
        replay = self._graphs[key]
        if replay is None:
            replay = self._graphs[key] = self._record(u, function)
        replay()
        return u

    @property
    def nbytes(self) -> int:
        """Device memory of the scratch and of what the graphs write, with cuBLAS's workspace."""
        segments = torch.cuda.memory_snapshot()
        of_graphs = (s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in self._graph_memory.pools)
        return self._memory.nbytes + sum(of_graphs)

    def _record(self, u: Tensor, function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """What runs ``function`` on ``u``, in place; that function itself where it cannot be captured."""

        def in_place() -> None:
            made = function(u)
            if made is not u:
                u.copy_(made)

        graph = torch.cuda.CUDAGraph()
        try:
            with self._graph_memory.recorded(graph, self._beside):
                in_place()
        except RuntimeError as error:
            warnings.warn(
                f"a matrix stage of {list(u.shape)} could not be captured as a CUDA graph and is launched as it is, "
                f"which is slower: {error}",
                stacklevel=2,
            )
            return in_place
        return graph.replay


def replays_of(slots: Sequence[Slot], backend: str) -> Replays | None:
    """Whose scratch, and whose matrix stage, the current stream has for ``slots``; None: they run as they are.

    Args:
        slots: of one rule, shape and device, with a scratch in one piece.
        backend: the one that was asked for.
    """
    first = slots[0]
    weight = first.weight
    if first.whole is not WHOLE or not 0 < len(slots) * weight.numel() <= most_elements:
        return None
    if not _has_matrix_stage(first.rule.stages):
        return None
    if weight.device.type != "cuda" or is_capturing(weight.device):
        return None
    stream = torch.cuda.current_stream(weight.device).cuda_stream
    known = first.memo.get("replays")
    if known is None or known.stream != stream:
        place = weight.device.index, stream
        if place in _left_out or resolve_backend(weight.device, backend) == "reference":
            return None
        known = _known.get(place)
        if known is None:
            known = _known[place] = Replays(weight.device, stream)
        first.memo["replays"] = known
    return known


def leave_out(stream: torch.cuda.Stream) -> None:
    """Whatever is launched on ``stream`` runs as it is."""
    _left_out.add((stream.device.index, stream.cuda_stream))


def replay_bytes(slots: Iterable[Slot]) -> int:
    """Device memory that matrix stages keep between steps on the devices of ``slots``, for all optimizers."""
    devices = {slot.weight.device for slot in slots if _has_matrix_stage(slot.rule.stages)}
    return sum(replays.nbytes for replays in list(_known.values()) if replays.device in devices)


def _has_matrix_stage(stages: Stages | None) -> bool:
    return stages is not None and stages.projection is None and bool(stages.transform or stages.direct)
