"""The store of factors: a weight gradient that waits, kept as ``(dY, X)`` instead of ``dYᵀ X``.

DESIGN section 4: when ``T (I + O) < I O`` keeping the factors is cheaper than keeping the gradient;
several uses, or several micro-batches, are one longer token axis. Where the factors of a whole window would
outgrow a gradient in fp32, or in bf16 on request, they are summed up in one accumulator, each pair in the backward
that brings it, so that nothing is kept beside it: a waiting weight holds its factors or one sum, whichever is smaller.
What several weights keep, such as the X of queries, keys and values, takes its memory once, and counts in equal parts.

A window is as long as ``accumulation_steps`` says, or as the one before. Its first micro-batch decides, when its
backward has ended and activations are gone. In a longer window, or one whose later micro-batches have more tokens, a
weight may change over inside a backward: one at a time then has both, while the kernel that sums its factors runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forge_megatron.kernels import FormedRows, GroupedRows, Segment, is_lookup


@dataclass(frozen=True)
class Kept:
    """One pair of factors, the versions they had, and the graph task and micro-batch that they belong to.

    Attributes:
        nbytes: what it takes; of what other weights keep too, a part.
        bounds: where the tokens of each expert are; None: the weight is one matrix.
        swapped: ``x`` is the gradient, see :class:`~forge_megatron.kernels.GroupedRows`.
    """

    dy: Tensor | FormedRows
    x: Tensor
    versions: tuple[int, int]
    task: int
    micro_batch: int
    nbytes: int
    bounds: Tensor | None = None
    swapped: bool = False

    @property
    def segment(self) -> Segment:
        return (self.dy if self.bounds is None else GroupedRows(self.dy, self.bounds, self.swapped)), self.x

    def storages(self) -> list[int]:
        """Where its tensors lie."""
        return [_storage(factor) for factor in (self.dy, self.x) if isinstance(factor, Tensor)]

    def shared(self, holders: Mapping[int, int]) -> Kept:
        """The same pair, each tensor counted by the number of pairs that hold it."""
        own = [
            _nbytes(factor) // (holders[_storage(factor)] if isinstance(factor, Tensor) else 1)
            for factor in (self.dy, self.x)
        ]
        return replace(self, nbytes=sum(own))

    def gradient(self) -> str | None:
        """Which of the two came from backward; None: neither is a gradient that somebody could hold."""
        if isinstance(self.dy, FormedRows):
            return None
        return "x" if self.swapped or is_lookup((self.dy, self.x)) else "dy"


def _nbytes(factor: Tensor | FormedRows | GroupedRows) -> int:
    if isinstance(factor, GroupedRows):
        factor = factor.rows
    return factor.nbytes() if isinstance(factor, FormedRows) else factor.numel() * factor.element_size()


def _version(factor: Tensor | FormedRows) -> int:
    return factor.version if isinstance(factor, FormedRows) else factor._version


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _copy(tensor: Tensor) -> Tensor:
    """The same strides over a copied storage: an expanded gradient stays small."""
    copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage().clone()
    return copied.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _own(tensor: Tensor, borrowed: bool) -> Tensor:
    """A tensor that nobody overwrites: autograd's own are kept as they are, others are copied."""
    storage = tensor.untyped_storage().nbytes()
    view_of_much_more = storage > 2 * tensor.numel() * tensor.element_size()
    return tensor.clone() if borrowed or view_of_much_more else tensor


class Factors:
    """The pending gradient of one weight ``[O, I]``: kept pairs and, if they grow too large, an accumulator.

    Args:
        weight: the parameter.
        dtype: the accumulator's, of a 16-bit weight; another's is fp32.

    Attributes:
        kept: the pairs.
        accumulator: ``[O, I]``, what was folded; None: nothing was.
        folded_tasks: the graph tasks that are in the accumulator.
        waited_as: what the last gradient that waited was kept as, "factors" or "accumulator"; "": none did.
        most_bytes: the most that it has taken so far.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float32):
        self._dtype = dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.float32
        self._sum_bytes = self._dtype.itemsize * weight.numel()
        self._shape = weight.shape
        self.kept: list[Kept] = []
        self.accumulator: Tensor | None = None
        self.folded_tasks: set[int] = set()
        self.most_bytes = 0
        self.waited_as = ""

    def __bool__(self) -> bool:
        """Something was delivered, be it of zero tokens."""
        return bool(self.kept) or self.accumulator is not None

    @property
    def segments(self) -> list[Segment]:
        return [pair.segment for pair in self.kept]

    def nbytes(self) -> int:
        return self._kept_bytes() + (0 if self.accumulator is None else self._sum_bytes)

    def _kept_bytes(self) -> int:
        return sum(pair.nbytes for pair in self.kept)

    def keep(
        self, dy: Tensor | FormedRows | GroupedRows, x: Tensor, task: int, micro_batch: int = 1, *, borrowed_x: bool
    ) -> None:
        """Keeps one pair. A borrowed ``x`` is copied, for somebody else may write to it; see :func:`keep_apart`."""
        x = _own(x, borrowed_x)
        bounds, swapped = None, False
        if isinstance(dy, GroupedRows):
            dy, bounds, swapped = dy.rows, dy.bounds.clone(), dy.swapped
        if isinstance(dy, FormedRows):
            dy.keep(x)
        elif is_lookup((dy, x)):
            x = x.detach()
        else:
            dy = _own(dy, False).detach()
        nbytes = _nbytes(dy) + _nbytes(x)
        self.kept.append(Kept(dy, x, (_version(dy), x._version), task, micro_batch, nbytes, bounds, swapped))
        self.waited_as = "factors"
        self.most_bytes = max(self.most_bytes, self.nbytes())

    def outgrown_by(self, dy: Tensor | FormedRows | GroupedRows, x: Tensor) -> bool:
        """A sum takes less than the pairs with this one, or is there already."""
        new = _nbytes(dy) + _nbytes(x)
        return self.accumulator is not None or self._kept_bytes() + new > self._sum_bytes

    def will_outgrow(self, micro_batch: int, coming: int) -> bool:
        """A sum takes less than the pairs with those of ``coming`` micro-batches like the one that has ended."""
        last = sum(pair.nbytes for pair in self.kept if pair.micro_batch == micro_batch)
        return self._kept_bytes() + coming * last > self._sum_bytes

    def fold(self, write: Callable[..., None], new: Sequence[Segment] = (), task: int | None = None) -> None:
        """Replaces the pairs by their sum in an ``[O, I]`` accumulator, or adds to it; rounded once.

        Args:
            write: ``write(segments, out, accumulator=)``, which writes ``Σ dYᵀ X``, with ``accumulator`` added.
            new: further pairs, which are not kept, of the graph task ``task``.
        """
        total = self.accumulator
        if total is None:
            total = torch.empty(self._shape, dtype=self._dtype, device=(*self.segments, *new)[0][1].device)
        write([*self.segments, *new], total, accumulator=self.accumulator)
        self.most_bytes = max(self.most_bytes, self._kept_bytes() + self._sum_bytes)
        self.accumulator = total
        self.waited_as = "accumulator"
        self.folded_tasks.update(pair.task for pair in self.kept)
        if task is not None:
            self.folded_tasks.add(task)
        self.kept.clear()

    def drop_task(self, task: int) -> None:
        """Forgets the pairs of a backward that failed."""
        self.kept = [pair for pair in self.kept if pair.task != task]

    def expect_unchanged(self, name: str) -> None:
        """Raises if a kept factor was overwritten in place before it was used."""
        for pair in self.kept:
            if (_version(pair.dy), pair.x._version) != pair.versions:
                raise RuntimeError(
                    f"{name}: an activation or output gradient that waits for its weight's update was modified in "
                    "place; call step() first, or write the next batch to another tensor"
                )

    def clear(self) -> None:
        if self:
            self.kept.clear()
            self.folded_tasks.clear()
            self.accumulator = None


def count_shared(weights: Iterable[tuple[Factors, int]]) -> None:
    """When a backward ends: counts what several weights keep in equal parts.

    Args:
        weights: each with the number of the micro-batch that has ended.
    """
    kept = [
        (factors.kept, index)
        for factors, micro_batch in weights
        for index, pair in enumerate(factors.kept)
        if pair.micro_batch == micro_batch
    ]
    holders = Counter(storage for pairs, index in kept for storage in pairs[index].storages())
    for pairs, index in kept:
        pairs[index] = pairs[index].shared(holders)


def keep_apart(weights: Iterable[Factors], task: int) -> None:
    """When a backward ends: copies each kept gradient that somebody else holds too, who may write to it.

    ``backward(gradient)`` is such a holder: an addition and a view hand its buffer on as it is. A write leaves no
    trace in a version counter if a collective or ``.data`` makes it. While a backward runs the engine holds them all.
    """
    kept = [
        (pairs, index, name)
        for pairs in (factors.kept for factors in weights)
        for index, pair in enumerate(pairs)
        if pair.task == task and (name := pair.gradient()) is not None
    ]
    ours = Counter(_storage(getattr(pairs[index], name)) for pairs, index, name in kept)
    for pairs, index, name in kept:
        pair = pairs[index]
        gradient = getattr(pair, name)
        key = _storage(gradient)
        storage = gradient.untyped_storage()
        # One more is the object that is asked.
        if torch._C._storage_Use_Count(storage._cdata) > ours[key] + 1:
            pair = replace(pair, **{name: _copy(gradient)})
            pairs[index] = replace(pair, versions=(_version(pair.dy), _version(pair.x)))
            ours[key] -= 1
