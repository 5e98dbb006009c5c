"""``python -m launch.bench BENCH [key=value ...] [--out FILE.json]``: run the cells that FILE does not have yet.

Exit codes: 0 every cell has a result (out of memory is one); 1 a cell failed or was refused; 2 the bench cannot run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from launch import provenance
from launch.bench import arms, report, spec

FAILED, IMPOSSIBLE = 1, 2
ROOT = Path(__file__).resolve().parents[2]


def run_cell(bench: spec.Bench, cell: spec.Cell) -> dict:
    """One process, so that no arm finds another's allocator, caches or hooks."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        order, answer = Path(folder, "order.json"), Path(folder, "answer.json")
        order.write_text(json.dumps(spec.order(bench, cell)))
        command = [sys.executable, "-m", "launch.bench.cell", str(order), str(answer)]
        began = time.monotonic()
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=bench.timeout_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {bench.timeout_s:g} s"}
        if ended.returncode or not answer.exists():
            return {"failed": "\n".join(ended.stderr.strip().splitlines()[-15:]) or f"exit code {ended.returncode}"}
        return json.loads(answer.read_text()) | {"seconds": round(time.monotonic() - began, 1)}


def resume(out: Path, head: dict) -> dict:
    """What ``out`` has, if the same sources, versions and bench made it; otherwise a new file's content."""
    if out.exists():
        log = json.loads(out.read_text())
        same = ("source_sha256", "versions")
        if log.get("bench") == head["bench"] and all(log["provenance"][key] == head["provenance"][key] for key in same):
            return log
    return {**head, "cells": {}}


def main(argv: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser("python -m launch.bench", description=__doc__.split("\n")[0])
    cli.add_argument("bench", help="a name in recipes/bench, or a YAML file")
    cli.add_argument("overrides", nargs="*", metavar="key=value")
    cli.add_argument("--out", type=Path, help="default: recipes/bench/results/BENCH.json")
    cli.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is started")
    options = cli.parse_args(argv)
    try:
        bench = spec.load(options.bench, options.overrides)
        for name in (*bench.arms, bench.baseline):
            arms.get(name)
    except ValueError as error:
        print(f"launch.bench: {error}", file=sys.stderr)
        return IMPOSSIBLE
    if not torch.cuda.is_available():
        print("launch.bench: no CUDA device, and no time is reported from anything else", file=sys.stderr)
        return IMPOSSIBLE
    out = options.out or spec.find_out(options.bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = resume(out, {"bench": asdict(bench), "provenance": provenance.describe()})
    began = time.monotonic()
    cells = spec.cells(bench)
    todo = [cell for cell in cells if cell.key not in log["cells"]]
    console = Console()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cells", total=len(todo))
        for cell in todo:
            if time.monotonic() - began > options.budget:
                break
            log["cells"][cell.key] = answer = run_cell(bench, cell)
            # After every cell: what was measured outlives a time limit.
            out.write_text(json.dumps(log, indent=1) + "\n")
            progress.advance(bar)
            console.print(report.line(cell.key, answer), highlight=False, soft_wrap=True)
    console.print(report.table(log))
    report.plot(log, out.with_suffix(".png"))
    left = [cell for cell in cells if cell.key not in log["cells"]]
    if left:
        console.print(f"left out: {len(left)} cells; the same command runs them", highlight=False)
    bad = [key for key, answer in log["cells"].items() if {"failed", "refused", "left_out"} & answer.keys()]
    return FAILED if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
