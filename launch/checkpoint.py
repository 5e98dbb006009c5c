"""Checkpoints on megatron-core's dist_checkpointing, written atomically.

A checkpoint is written into a folder whose name begins with a dot, made durable, listed in its
manifest, and renamed: a folder ``step_N`` is whole, or damaged later. Resuming takes the newest one
that its manifest confirms.
"""

from __future__ import annotations

import logging
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from launch import manifest

_log = logging.getLogger(__name__)
_PREFIX = "step_"
_PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or does not fit; the message says which and what to do."""


@contextmanager
def _signals_held() -> Iterator[None]:
    """Deliver stop signals after the save: Megatron's writer has helper processes, which inherit
    this mask, and a signal to the whole process group would otherwise kill them mid-file."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def on_rank_zero(action) -> None:
    """``action`` on rank 0 once every rank is here; nobody goes on before it is done. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def found(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, the newest first."""
    numbered = (p for p in folder.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit())
    return sorted(numbered, key=step_of, reverse=True)


def save(folder: Path, step: int, state: dict, keep: int = 2) -> Path:
    """Write ``state`` (a sharded state dict) as ``folder/step_N``. Collective.

    Older checkpoints than the newest ``keep`` are removed once this one is in place. Those of a later step belong
    to a run that this one has left behind; they are renamed, so that no resume takes them.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    partial = folder / f"{_PARTIAL}-{final.name}"
    with _signals_held():
        on_rank_zero(lambda: _fresh(partial))
        dist_checkpointing.save(state, str(partial))
        manifest.write(partial, step)
        on_rank_zero(lambda: _put_in_place(partial, final, keep))
    return final


def _put_in_place(partial: Path, final: Path, keep: int) -> None:
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for later in found(final.parent):
        if step_of(later) > step_of(final):
            _set_aside(later, "replaced")
    manifest.sync_folder(final.parent)
    for old in found(final.parent)[keep:]:
        shutil.rmtree(old)


def _set_aside(folder: Path, why: str) -> None:
    """Rename a checkpoint, so that it is neither resumed from nor counted among those that are kept."""
    aside = folder.with_name(f"{why}-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    _log.warning("checkpoint %s is %s: it is now %s", folder, why, aside.name)


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that its manifest confirms; None where there is none at all. Collective.

    Newer ones that are damaged are renamed: counted among those that are kept, they would push out whole ones.

    Raises:
        CheckpointError: there are checkpoints, and every one is damaged.
    """
    candidates = found(folder)
    damaged: list[Path] = []
    for candidate in candidates:
        fault = manifest.fault(candidate)
        if fault is None:
            on_rank_zero(lambda: [_set_aside(each, "damaged") for each in damaged])
            return candidate
        damaged.append(candidate)
        if dist.get_rank() == 0:
            _log.warning("checkpoint %s is damaged and passed over: %s", candidate, fault)
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} is whole: move them away, or "
            "start over with checkpoint.resume=false"
        )
    return None


def common(folder: Path) -> dict:
    """What is not sharded: the schedule and the progress."""
    return dist_checkpointing.load_common_state_dict(str(folder))


def load(folder: Path, state: dict, optional: tuple[str, ...] = ()) -> dict:
    """Read into ``state``'s layout. Collective.

    Args:
        optional: prefixes of keys that may be in the checkpoint without being asked for, of each of several chained
            optimizers.

    Raises:
        CheckpointError: a key is missing, or in the checkpoint and not in ``state``.
    """
    # Megatron's names: "unexpected" was asked for and is not there, "missing" is there and was not asked for.
    loaded, missing, unexpected = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    surplus = sorted(key for key in missing if not re.sub(r"^chained_\d+\.", "", key).startswith(optional))
    if unexpected or surplus:
        raise CheckpointError(
            f"{folder} does not fit this run: it lacks {sorted(unexpected)[:8]} and has besides {surplus[:8]}. "
            "Was it written with another model or optimizer?"
        )
    return loaded
