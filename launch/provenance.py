"""What a measurement was made of: sources, versions, device. Written beside every number that is kept."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import runpy
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def _folder_of(package: str) -> Path:
    """The folder that ``import package`` would use: an installed forge_megatron is hashed, not the checkout's."""
    return Path(importlib.util.find_spec(package).origin).parent


def source_hashes(packages: Iterable[str]) -> dict[str, str]:
    """SHA-256 of every Python source of ``packages``, by its path from the checkout's root."""
    hashes = {}
    for package in packages:
        folder = _folder_of(package)
        for path in sorted(folder.rglob("*.py")):
            name = f"{package}/{path.relative_to(folder).as_posix()}"
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def code_hash(hashes: dict[str, str]) -> str:
    """One hash of all the sources, of their names as well as of their bytes."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def _megatron_version() -> str:
    """The version of the megatron.core that would be imported, which need not be the installed distribution.

    0.19 appends the commit of the git repository that encloses it, which for an environment in a checkout is ours.
    """
    if importlib.util.find_spec("megatron") is None:
        return "none"
    info = _folder_of("megatron.core") / "package_info.py"
    return runpy.run_path(str(info))["__version__"].partition("+")[0]


def installed(*distributions: str) -> dict[str, str]:
    """The version of each, "none" where it is not here."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def versions() -> dict[str, str]:
    """Versions of all that a measurement depends on; "none" for what is not here."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **installed("triton"),
        "megatron-core": _megatron_version(),
        "cuda": torch.version.cuda or "none",
    }


def gpus() -> list[dict[str, str]]:
    """Name, driver, clocks, temperature and power of every GPU, as its driver says now."""
    if not torch.cuda.is_available():
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().splitlines()
    return [dict(zip(GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=True)) for line in lines]


def describe() -> dict:
    """All of it, for the head of a results file."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "source_sha256": code_hash(source_hashes(("forge_megatron", "launch"))),
        "versions": versions(),
        "gpus": gpus(),
        "cpu": platform.machine(),
    }
