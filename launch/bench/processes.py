"""A process a cell, or one a rank: no arm finds another's allocator, caches or hooks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def in_folder(order: dict, run: Callable[[Path, Path, Path], int | None]) -> dict:
    """The answer to ``order`` of ``run(order, answer, errors)``, which returns an exit code, or None in time-out."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        files = [Path(folder, name) for name in ("order.json", "answer.json", "errors")]
        told, answer, errors = files
        told.write_text(json.dumps(order))
        began = time.monotonic()
        code = run(told, answer, errors)
        seconds = {"cell": order["cell"], "seconds": round(time.monotonic() - began, 1)}
        if code is None:
            return {"failed": f"no answer in {order['bench']['timeout_s']:g} s", **seconds}
        if code or not answer.exists():
            said = errors.read_text(errors="replace") if errors.exists() else ""
            return {"failed": _last_lines(said) or f"exit code {code}", **seconds}
        return json.loads(answer.read_text()) | seconds


class Spawned:
    """Each cell is a new interpreter; over ranks, torchrun's."""

    def run(self, order: dict) -> dict:
        return in_folder(order, lambda *files: self._run(order, *files))

    def _run(self, order: dict, told: Path, answer: Path, errors: Path) -> int | None:
        ranks = order["bench"]["world_size"]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        command = [sys.executable, "-m", *torchrun, "launch.bench.cell", str(told), str(answer)]
        with errors.open("w") as out:
            # A session of its own, so that torchrun's ranks end with it.
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
            try:
                return process.wait(order["bench"]["timeout_s"])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None

    def close(self) -> None:
        pass


class Forked:
    """Each cell, or each of its ranks, is a fork of one process that has imported torch and transformers.

    It saves the imports, which take longer than most cells. That process never touches a GPU.

    Args:
        megatron: the cells are through Megatron.
        device: "cpu" or "cuda", for which Megatron is imported.
    """

    def __init__(self, megatron: bool = False, device: str = "cuda"):
        environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "launch.bench.nursery", *(["--megatron", device] if megatron else [])]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def run(self, order: dict) -> dict:
        return in_folder(order, lambda *files: self._run(order, *files))

    def _run(self, order: dict, *files: Path) -> int | None:
        asked = {
            "ranks": order["bench"]["world_size"],
            "timeout_s": order["bench"]["timeout_s"],
            "port": free_port(),
            "files": [str(file) for file in files],
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise RuntimeError(f"the process that cells are forked from ended with code {self._process.wait()}")
        return json.loads(said)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
