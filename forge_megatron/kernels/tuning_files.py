"""What tuning has found, kept on disk: one file a cell, named by all that a choice depends on.

A file is written whole beside its place and then renamed, so that a reader on another rank never sees half of one, and
no two cells share a file. It names a candidate of the curated set; nothing else of it is believed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .tuned import Candidate, Cell
from .tuning import Outcome

ROOT = Path(__file__).resolve().parents[1]

#: What a kernel is made of.
PACKAGES = ("rules", "formats", "kernels")


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/forge_megatron/tuning``, or the same in ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "forge_megatron" / "tuning"


@functools.cache
def source_hash() -> str:
    """SHA-256 of the sources of rules, formats and kernels, with their names."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read(folder: Path, cell: Cell, tried: Sequence[Candidate]) -> Outcome | None:
    """Return what was found for ``cell``; None: nothing, or (with a warning that names the file) nothing readable."""
    path = _path(folder, cell)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        return _ignored(path, f"not readable ({error})")
    known = {str(candidate): candidate for candidate in tried}
    try:
        kept = json.loads(text)
        if kept["key"] != _key(cell):
            return _ignored(path, "made for another device, version or kernel")
        us = {str(name): float(value) for name, value in kept["us"].items()}
        left_out = {str(name): str(reason) for name, reason in kept["left_out"].items()}
        chosen, default = known[kept["chosen"]], known[kept["default"]]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return _ignored(path, f"not what tuning writes ({type(error).__name__}: {error})")
    if default != tried[0] or kept["chosen"] in left_out:
        return _ignored(path, "its choice is none of this device's")
    return Outcome(default, chosen, us, left_out)


def write(folder: Path, cell: Cell, outcome: Outcome) -> None:
    """Keeps ``outcome``; where that is impossible it warns, and the next process tunes again."""
    path = _path(folder, cell)
    kept = {
        "key": _key(cell),
        "default": str(outcome.default),
        "chosen": str(outcome.chosen),
        "us": outcome.us,
        "left_out": outcome.left_out,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=folder, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file, indent=1)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        warnings.warn(f"{path}: what was tuned is not kept ({error})", stacklevel=2)


def _ignored(path: Path, problem: str) -> None:
    warnings.warn(f"{path}: {problem}; it is ignored, and tuned anew", stacklevel=3)


def _key(cell: Cell) -> dict[str, object]:
    """All that a choice depends on, as JSON gives it back."""
    made_by = {"torch": torch.__version__, "triton": _triton(), "cuda": torch.version.cuda, "source": source_hash()}
    return {**json.loads(json.dumps(asdict(cell))), **made_by}


def _path(folder: Path, cell: Cell) -> Path:
    name = hashlib.sha256(json.dumps(_key(cell), sort_keys=True).encode()).hexdigest()
    return folder / f"{name[:32]}.json"


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"
