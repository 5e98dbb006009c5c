"""Runs cases: torchrun starts gates.worker on every rank, and what they measured comes back as Results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from gates.gate import Case, Reading, Result
from gates.receipt import ROOT, device_name

TIMEOUT_S = 300
LAST_LINES = 100  # torchrun's own report comes after the ranks' and takes half of them
TO_END_S = 40  # what torchrun may take to end its workers: it sends SIGKILL after 30 seconds


def run(cases: list[Case], timeout_s: float = TIMEOUT_S) -> Iterator[Result]:
    """Run the cases; those that need the same processes share them, because starting them takes the longest.

    A crash or a hang is a red result, with the end of what the ranks printed; the cases after it get new processes.

    Args:
        cases: in the order of the results.
        timeout_s: the longest that one case may take.
    """
    for _, group in groupby(cases, key=lambda case: (case.device, case.degrees)):
        pending = list(group)
        while pending:
            results = list(_run_together(pending, timeout_s))
            yield from results
            pending = pending[len(results) :]


def _run_together(cases: list[Case], timeout_s: float) -> Iterator[Result]:
    """Results up to the first case without an answer, which is the one that failed."""
    with tempfile.TemporaryDirectory(prefix="gates-") as folder:
        log = Path(folder, "log")
        start = time.monotonic()
        failure = _torchrun(cases, Path(folder), log, timeout_s * len(cases))
        for i, case in enumerate(cases):
            answer = Path(folder, f"{i}.json")
            name = device_name(case.device)
            if not answer.exists():
                failure = _report(Path(folder), log) or failure or "the ranks ended without an answer"
                yield Result(case, (), time.monotonic() - start, name, failure)
                return
            content = json.loads(answer.read_text(encoding="utf-8"))
            yield Result(case, tuple(Reading(**r) for r in content["readings"]), content["seconds"], name)


def _torchrun(cases: list[Case], folder: Path, log: Path, timeout_s: float) -> str:
    """Run the ranks to their end. Returns what went wrong, or nothing."""
    ranks = f"--nproc-per-node={cases[0].degrees.world}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, "-m", "gates.worker"]
    command += [json.dumps([case.to_dict() for case in cases]), str(folder)]
    # One connection keeps the order in which a collective and the update behind it were issued.
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"no answer in {timeout_s:g} s"
        finally:
            if process.poll() is None:
                _end(process)
    return f"a rank failed (torchrun's exit code {code})" if code else ""


def _end(process: subprocess.Popen) -> None:
    """torchrun ends its workers, which are not in its process group, when it is asked to end itself."""
    process.terminate()
    try:
        process.wait(TO_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _report(folder: Path, log: Path) -> str:
    """Print what the ranks said. Returns the error of the rank that failed first, if one wrote it down."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime)
    if errors:
        traceback = errors[0].read_text(encoding="utf-8")
        sys.stderr.write(f"rank {errors[0].stem}:\n{traceback}")
        return traceback.strip().splitlines()[-1]
    sys.stderr.write("".join(log.read_text(errors="replace").splitlines(keepends=True)[-LAST_LINES:]))
    return ""
