"""Forks a process a cell or rank, after the imports: a line of JSON in, its exit code out (null: out of time).

``python -m launch.bench.nursery [--megatron cpu|cuda]``: cells through Megatron need it in place of transformers.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from launch import cpu, quiet
from launch.bench import cell, model

POLL_S = 0.02


def child(rank: int, asked: dict) -> None:
    """Runs in the fork, and never returns."""
    told, answer, errors = map(Path, asked["files"])
    code = 1
    try:
        out = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if asked["ranks"] > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(asked["ranks"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(asked["port"]),
            }
        cell.main(told, answer)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the parent's exit handlers.
        os._exit(code)


def wait(pids: set[int], until: float) -> int | None:
    """The first exit code that is not 0, or 0; the others of a failed cell, and all after ``until``, are ended."""
    while pids:
        if time.monotonic() > until:
            _end(pids)
            return None
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pids.remove(pid)
                if code := os.waitstatus_to_exitcode(status):
                    _end(pids)
                    return code
        time.sleep(POLL_S)
    return 0


def _end(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    pids.clear()


def main(argv: list[str]) -> None:
    if argv:
        quiet.hush()
        cpu.enable(argv[1])
        importlib.import_module("launch.bench.megatron_loop")
        importlib.import_module("forge_megatron.megatron.build")
    else:
        model.warm()
    if torch.cuda.is_initialized():
        raise RuntimeError("an import has initialised CUDA, which a fork cannot use; run the bench without --fork")
    for line in sys.stdin:
        asked = json.loads(line)
        pids = set()
        for rank in range(asked["ranks"]):
            pid = os.fork()
            if pid == 0:
                child(rank, asked)
            pids.add(pid)
        print(json.dumps(wait(pids, time.monotonic() + asked["timeout_s"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
