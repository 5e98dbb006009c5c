"""The list of a checkpoint's files with their sizes and SHA-256: what makes it whole.

Every rank hashes its share of the files; nothing here knows what a checkpoint holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch.distributed as dist

MANIFEST = "manifest.json"


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable: a rename is only durable once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _files(folder: Path) -> list[str]:
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in found if name != MANIFEST)


def _share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def write(folder: Path, step: int) -> None:
    """Make every file durable and list it in ``folder/manifest.json``. Collective."""
    dist.barrier()
    entries = {}
    for name in _share(_files(folder)):
        path = folder / name
        _sync_file(path)
        entries[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    gathered: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, entries)
    if dist.get_rank() == 0:
        files = {name: entry for part in gathered for name, entry in sorted(part.items())}
        path = folder / MANIFEST
        path.write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n")
        _sync_file(path)
        sync_folder(folder)
    dist.barrier()


def fault(folder: Path) -> str | None:
    """Why the folder is not whole, or None. Collective: all ranks get the same answer."""
    found = _local_fault(folder)
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return next((text for text in gathered if text is not None), None)


def _local_fault(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is not readable: {error}"
    for name in _share(sorted(files)):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != files[name]["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {files[name]['bytes']} were written"
        if _digest(path) != files[name]["sha256"]:
            return f"{name} was changed after it was written (checksum)"
    return None
