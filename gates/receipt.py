"""The receipt: which cases were green, for which sources, versions and device.

One JSON file in the checkout. A later run of a case replaces its entry. An entry that does not describe what is here
now is stale, and says what changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from gates.gate import Case, Result
from launch.provenance import code_hash, source_hashes, versions

ROOT = Path(__file__).resolve().parents[1]
RECEIPT = ROOT / ".gates" / "receipt.json"
SCHEMA = 1
#: What can change what a gate measures.
PACKAGES = ("forge_megatron", "launch", "gates")


def device_name(device: str) -> str:
    """The kind of device: a GPU's own name, or the processor's architecture."""
    return torch.cuda.get_device_name(0) if device == "cuda" else f"cpu {platform.machine()}"


#: What every entry is read for.
FIELDS = frozenset(("code", "versions", "device", "passed", "readings", "failure", "at"))


class Receipt:
    """The receipt's file, read and written whole.

    Args:
        path: where it is; it need not exist yet.

    Raises:
        ValueError: the file is there but is not a receipt of this schema.
    """

    def __init__(self, path: Path = RECEIPT) -> None:
        self.path = path
        self.hashes = source_hashes(PACKAGES)
        self.here = {"code": code_hash(self.hashes), "versions": versions()}
        self.sources: dict[str, dict[str, str]] = {}
        self.entries: dict[str, dict] = {}
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            schema, self.sources, self.entries = content["schema"], content["sources"], content["entries"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not a receipt ({error!r}): delete it and run python -m gates") from error
        if schema != SCHEMA:
            raise ValueError(f"{self.path} has schema {schema}, this code writes {SCHEMA}: delete it")
        for key, entry in self.entries.items():
            if lacking := FIELDS - entry.keys():
                raise ValueError(
                    f"{self.path}: {key} has no {', '.join(sorted(lacking))}: delete it and run python -m gates"
                )

    def add(self, result: Result) -> None:
        """Write a result down, beside what other processes wrote meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._read()
            self.entries[result.case.key] = {
                "case": result.case.to_dict(),
                "world_size": result.case.degrees.world,
                "device": result.device_name,
                **self.here,
                "passed": result.passed,
                "readings": [asdict(reading) for reading in result.readings],
                "failure": result.failure,
                "seconds": round(result.seconds, 1),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            self.sources[self.here["code"]] = self.hashes
            used = {entry["code"] for entry in self.entries.values()}
            self.sources = {code: hashes for code, hashes in self.sources.items() if code in used}
            scratch = self.path.with_suffix(f".{os.getpid()}.tmp")
            content = {"schema": SCHEMA, "entries": self.entries, "sources": self.sources}
            scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(scratch, self.path)

    def covers(self, case: Case) -> bool:
        """Whether the case was ever run here, whatever came of it."""
        return case.key in self.entries

    def objection(self, case: Case) -> str:
        """Why the case's entry does not let a job start: it is red or stale. Empty where it does."""
        entry = self.entries[case.key]
        changes = self._changed_sources(entry["code"])
        for name, version in self.here["versions"].items():
            if entry["versions"].get(name) != version:
                changes.append(f"{name} {entry['versions'].get(name)} -> {version}")
        if (name := device_name(case.device)) != entry["device"]:
            changes.append(f"device {entry['device']} -> {name}")
        said = []
        if not entry["passed"]:
            said.append(f"red: {entry['failure'] or self._worst(entry['readings'])}")
        if changes:
            said.append(f"stale, changed since {entry['at']}: {', '.join(changes)}")
        return "; ".join(said)

    def _changed_sources(self, code: str) -> list[str]:
        if code == self.here["code"]:
            return []
        then = self.sources.get(code, {})
        names = sorted(name for name in then.keys() | self.hashes.keys() if then.get(name) != self.hashes.get(name))
        return names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more files"]

    @staticmethod
    def _worst(readings: list[dict]) -> str:
        failed = [r for r in readings if not r["value"] <= r["bound"]]
        return ", ".join(f"{r['what']} {r['value']:.3g}, bound {r['bound']:.3g}" for r in failed)
