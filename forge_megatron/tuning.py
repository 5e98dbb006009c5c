"""``forge.tune``: the kernels' configurations for a model's shapes, measured on this device before training.

Nothing is tuned in a step, on a live weight, or in a way that changes a result: candidates whose bits differ from the
untuned choice's are dropped. All ranks take the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from forge_megatron.capture import Capturing
from forge_megatron.kernels import resolve_backend, tuned, tuning, tuning_files
from forge_megatron.kernels.tuned import Cell
from forge_megatron.kernels.tuning import Outcome
from forge_megatron.linear.owned import in_backward
from forge_megatron.vocab import ForgeEmbedding

if TYPE_CHECKING:
    from forge_megatron.kernels import Slot


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` has found; prints as a table.

    Attributes:
        outcomes: of each kind of launch, over all ranks.
        measured: those that were measured now; the others were on disk.
        not_tuned: why weights were left out, by name, and kinds of launch, of this rank.
    """

    outcomes: Mapping[Cell, Outcome]
    measured: frozenset[Cell]
    not_tuned: Mapping[str, str]

    def __str__(self) -> str:
        lines = []
        for cell, outcome in self.outcomes.items():
            before, after = (outcome.us.get(str(each)) for each in (outcome.default, outcome.chosen))
            times = "" if before is None else f" ({before:.1f} -> {after:.1f} µs)"
            origin = "measured" if cell in self.measured else "from disk"
            dropped = ", ".join(f"{name}: {reason}" for name, reason in outcome.left_out.items())
            lines.append(
                f"{cell}: {outcome.default} -> {outcome.chosen}{times}, {origin}" + (dropped and f"; not {dropped}")
            )
        return "\n".join([*lines, *(f"{name}: not tuned: {reason}" for name, reason in self.not_tuned.items())])


@dataclass(frozen=True)
class _Job:
    """One kind of launch that this rank has."""

    slot: Slot
    hyperparameters: Mapping
    multiplied: bool


class Tunable(Capturing):
    """An optimizer whose launches can be tuned."""

    def expect_tunable(self) -> None:
        """Raises where tuning would come into a step."""
        if in_backward():
            raise RuntimeError("tune() inside backward; call it at set-up, before the first step")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("tune() while a CUDA graph is captured; call it at set-up, before capture()")
        if self._graphs is not None:
            raise RuntimeError("tune() after capture(), whose recordings keep the kernels they have; call it before")
        for book in self._books:
            book.expect_nothing_pending("tune")

    def launches(self, tokens: Sequence[int], dtype: torch.dtype | None) -> tuple[dict[Cell, _Job], dict[str, str]]:
        """The kinds of launch that step the owned weights, and why other weights have none."""
        jobs, not_tuned = {}, {}
        for p, owned in self.owned.items():
            reason = self._reason_untunable(p)
            if reason is not None:
                not_tuned[owned.name] = reason
                continue
            multiplied = self._plan.waits or self._plan.gradient_scale != 1.0
            job = _Job(owned.slot, self._group_of[p], multiplied)
            for count in tokens:
                jobs.setdefault(Cell.of(owned.slot, dtype or p.dtype, count, self.backend), job)
        return jobs, not_tuned

    def _reason_untunable(self, p: Tensor) -> str | None:
        slot = self.owned[p].slot
        if slot is None or not p.requires_grad:
            return "it is frozen"
        if self._sums is not None:
            return "its gradient is summed over ranks before it is stepped"
        if slot.rule.stages is not None:
            return f"{slot.rule.name} steps in stages"
        if p.dim() != 2:
            return "experts in one tensor have one launch for all"
        if any(isinstance(module, ForgeEmbedding) and module.weight is p for module in self.fused_modules):
            return "an embedding is stepped by token id"
        if resolve_backend(p.device, self.backend) == "reference":
            return f"{p.device} runs the reference, which has no configurations"
        return None


def tune(
    optimizers: Tunable | Iterable[Tunable],
    tokens: Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    folder: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    timer: tuning.Timer = tuning.device_us,
) -> Tuned:
    """Measures which kernel and configuration steps each owned linear fastest, and takes it from now on.

    Candidates are a curated set for the device (paper, Appendix H). They are timed on copies with random factors:
    weights, states, random generators and, afterwards, the memory in use are as before. One that leaves other bits in
    weights or states than the untuned choice is dropped, so that a tuned run is the untuned run; the norms that are
    reported may differ in their last fp32 digits. What was found is kept on disk, by device, versions and the kernels'
    sources. Steps of other numbers of tokens, or from several uses or an accumulator, are chosen as without tuning.

    >>> optimizer = forge.attach(model, lr=1e-3)
    >>> print(forge.tune(optimizer, tokens=[batch_size * sequence_length]))

    Where ``torch.distributed`` is initialised it is a collective: ranks share the work, and all take one table.

    Args:
        optimizers: from :func:`forge_megatron.attach`, or several of them (a rank's optimizers under Megatron).
        tokens: of a backward, at least 1 each: what X ``[tokens, I]`` has.
        dtype: of X and dY, where it is not the weights', as under autocast.
        folder: of the files; default: ``$XDG_CACHE_HOME/forge_megatron/tuning``, or the same in ``~/.cache``.
        process_group: the ranks that call it; default: all.
        timer: ``(launches, device) -> µs`` of one of the launches.

    Returns:
        A table of what was chosen.

    Raises:
        ValueError: a number of tokens below 1.
        RuntimeError: inside backward, with a backward pending, while or after a step is captured, or a rank failed.
    """
    optimizers = [optimizers] if isinstance(optimizers, Tunable) else list(optimizers)
    tokens = sorted(set(tokens))
    if not tokens or not all(isinstance(count, int) and count >= 1 for count in tokens):
        raise ValueError(f"tokens={tokens!r}; give the numbers of tokens of a backward, at least 1 each")
    for optimizer in optimizers:
        optimizer.expect_tunable()
    jobs: dict[Cell, _Job] = {}
    not_tuned: dict[str, str] = {}
    for optimizer in optimizers:
        own, reasons = optimizer.launches(tokens, dtype)
        jobs = {**own, **jobs}
        not_tuned.update(reasons)
    folder = tuning_files.default_folder() if folder is None else Path(folder)
    ranks = _Ranks(process_group)
    found, measured, failed = {}, set(), {}
    for cell in ranks.share(list(jobs)):
        try:
            found[cell], fresh = _tune_one(cell, jobs[cell], folder, timer)
            measured |= {cell} if fresh else set()
        except torch.OutOfMemoryError:
            failed[cell] = "no room for the copies"
        except Exception as error:
            if not ranks.several:
                raise
            # The other ranks wait for this one.
            ranks.error = f"{cell}: {type(error).__name__}: {error}"
            break
    every = ranks.gather((found, measured, failed))
    found = {cell: outcome for part, _, _ in every for cell, outcome in part.items()}
    not_tuned.update((str(cell), why) for _, _, part in every for cell, why in part.items())
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    tuned.install({cell: outcome.chosen for cell, outcome in found.items()})
    return Tuned(found, frozenset(cell for _, part, _ in every for cell in part), not_tuned)


def _tune_one(cell: Cell, job: _Job, folder: Path, timer: tuning.Timer) -> tuple[Outcome, bool]:
    """What is on disk, or was measured now, and which of the two."""
    kept = tuning_files.read(folder, cell, tuning.tried(job.slot, cell))
    if kept is not None:
        return kept, False
    outcome = tuning.tune_cell(job.slot, cell, job.hyperparameters, multiplied=job.multiplied, timer=timer)
    tuning_files.write(folder, cell, outcome)
    return outcome, True


class _Ranks:
    """The ranks that tune together; one alone where torch.distributed is not initialised."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.error: str | None = None

    def share(self, cells: list[Cell]) -> Iterator[Cell]:
        """Those of this rank's ``cells`` that it tunes for all: each is tuned by one of the ranks that have it."""
        if not self.several:
            return iter(cells)
        owners: dict[Cell, list[int]] = {}
        for rank, theirs in enumerate(self._all(cells)):
            for cell in theirs:
                owners.setdefault(cell, []).append(rank)
        mine = dist.get_rank(self._group)
        return iter(
            [cell for number, (cell, having) in enumerate(owners.items()) if having[number % len(having)] == mine]
        )

    def gather(self, own: tuple) -> list[tuple]:
        """Every rank's ``own``; raises on all of them if one failed."""
        if not self.several:
            return [own]
        every = self._all((self.error, own))
        for rank, (error, _) in enumerate(every):
            if error is not None:
                raise RuntimeError(f"tune() failed on rank {rank}: {error}")
        return [part for _, part in every]

    def _all(self, mine):
        every = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        return every
