"""What a measurement was made of: sources, versions, device. Written beside every number that is kept."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("triton", "megatron-core", "numpy")
GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def source_hash(packages: tuple[str, ...] = ("forge_megatron", "launch")) -> str:
    """SHA-256 of every Python source of ``packages``, of their names as well as of their bytes."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(importlib.util.find_spec(package).origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    installed = {it.name: it.version for it in metadata.distributions()}
    found = {name: installed.get(name, "none") for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **found,
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
        "source_sha256": source_hash(),
        "versions": versions(),
        "gpus": gpus(),
        "cpu": platform.machine(),
    }
