"""``python -m launch.bench BENCH [key=value ...] [--out FILE.json]``: run the cells that FILE does not have yet.

``python -m launch.bench figure FILE.json ... --out FIGURE.png``: draw what is there.

``python -m launch.bench table FILE.json ...``: one table of all of them.

Exit codes: 0 every cell has a result (out of memory is one); 1 a cell failed, was refused or left out; 2 the bench
cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from launch import provenance
from launch.bench import arms, figure, layout, liger, model, report, shapes, spec
from launch.bench.arm import Settings
from launch.bench.processes import Forked, Spawned

FAILED, IMPOSSIBLE = 1, 2


def resume(out: Path, head: dict) -> dict:
    """What ``out`` has, if the same sources, versions and kind of GPU made it; otherwise a new file's content.

    Cells that failed, or whose package was missing, are dropped, so that they are run again. The grid may have grown.
    """
    fresh = {**head, "cells": {}}
    if not out.exists():
        return fresh
    log = json.loads(out.read_text())
    if identity(log) != identity(fresh):
        return fresh
    good = {key: answer for key, answer in log["cells"].items() if not {"failed", "left_out"} & answer.keys()}
    return {**head, "cells": good}


def identity(log: dict) -> tuple:
    """What must be the same for two cells to be compared."""
    of_cells = ("world_size", "warm_up", "steps", "lr")
    made_by = log["provenance"]
    gpus = [gpu["name"] for gpu in made_by["gpus"]]
    return made_by["source_sha256"], made_by["versions"], gpus, [log["bench"].get(key) for key in of_cells]


def known_parity(log: dict, cell: spec.Cell) -> dict | None:
    """The check of the same arm on the same kind of model and degrees, by an earlier cell of this file."""
    kind = shapes.get(cell.shape).kind
    for answer in log["cells"].values():
        earlier, checked = spec.Cell(**answer["cell"]), answer.get("parity")
        if checked and checked["kind"] == kind and (earlier.arm, earlier.through) == (cell.arm, cell.through):
            return checked
    return None


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser("python -m launch.bench", description=__doc__.split("\n")[0])
    cli.add_argument("bench", help="a name in recipes/bench, or a YAML file; or 'figure' or 'table' and results files")
    cli.add_argument("overrides", nargs="*", metavar="key=value")
    cli.add_argument("--out", type=Path, help="default: recipes/bench/results/BENCH.json")
    cli.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is started")
    cli.add_argument("--fork", action="store_true", help="fork cells from one process that has made the imports")
    cli.add_argument("--place", action="append", help="figure: only this, for example llama-3.1-8b/b1/s512")
    cli.add_argument(
        "--rehearse", action="store_true", help="run the same code on the CPU, over gloo; its numbers are none"
    )
    return cli


def draw_figure(files: list[str], out: Path | None, places: list[str] | None) -> int:
    if not files or out is None:
        print("launch.bench figure: give results files and --out FIGURE.png", file=sys.stderr)
        return IMPOSSIBLE
    drawn = figure.draw([json.loads(Path(file).read_text()) for file in files], out, places)
    if not drawn:
        print(f"launch.bench figure: nothing was measured in {', '.join(files)}", file=sys.stderr)
    return 0 if drawn else IMPOSSIBLE


def print_table(files: list[str]) -> int:
    if not files:
        print("launch.bench table: give results files", file=sys.stderr)
        return IMPOSSIBLE
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(report.table(*(json.loads(Path(file).read_text()) for file in files)))
    return 0


def refuse(bench: spec.Bench, rehearse: bool) -> str | None:
    """Why the bench cannot run here, or None."""
    for name in bench.arms:
        arm = arms.get(name)
        if arm.over_ranks != (bench.world_size > 1):
            what = "needs ranks" if arm.over_ranks else "is for one GPU"
            return f"arms: {name} {what}, and world_size={bench.world_size}"
        if (arm.megatron is not None) != bool(bench.parallel):
            what = "names no degrees" if arm.megatron is not None else f"is {bench.parallel}, for arms through Megatron"
            return f"parallel: {what}, and arms has {name}"
    for name in bench.shapes:
        kind = shapes.get(name).kind
        if not bench.parallel and kind not in model.KINDS:
            return f"shapes: {name} is built through Megatron only, and parallel names no degrees"
        if True in bench.liger and (bench.parallel or kind not in liger.KINDS):
            return f"liger: {name} has no kernels of Liger's here; they are for Hugging Face's {', '.join(liger.KINDS)}"
    if True in bench.liger and rehearse:
        return "liger: its kernels do not run on a CPU; rehearse with liger=[false]"
    device = "cpu" if rehearse else "cuda"
    for cell in spec.cells(bench) if bench.parallel else ():
        what = shapes.get(cell.shape), cell.layout(bench.world_size), cell.batch, cell.sequence
        layout.recipe(*what, Settings(bench.lr, 0.0), device, arms.get(cell.arm).megatron)
    if not rehearse and not torch.cuda.is_available():
        return "no CUDA device, and no time is reported from anything else; --rehearse runs the code on the CPU"
    if not rehearse and torch.cuda.device_count() < bench.world_size:
        return f"world_size={bench.world_size}, and there are {torch.cuda.device_count()} GPUs"
    return None


def main(argv: list[str] | None = None) -> int:
    # Options may stand between the changes.
    options = parser().parse_intermixed_args(argv)
    if options.bench == "figure":
        return draw_figure(options.overrides, options.out, options.place)
    if options.bench == "table":
        return print_table(options.overrides)
    try:
        bench = spec.load(options.bench, options.overrides)
        why = refuse(bench, options.rehearse)
    except ValueError as error:
        why = str(error)
    if why is not None:
        print(f"launch.bench: {why}", file=sys.stderr)
        return IMPOSSIBLE
    if options.rehearse and options.out is None:
        print("launch.bench: --rehearse needs --out: its numbers must not lie among the results", file=sys.stderr)
        return IMPOSSIBLE
    out = options.out or spec.find_out(options.bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    made_by = provenance.describe()
    made_by["versions"] |= provenance.installed("transformers", "liger-kernel")
    log = resume(out, {"bench": asdict(bench), "provenance": made_by})
    return measure(bench, log, out, options)


def measure(bench: spec.Bench, log: dict, out: Path, options: argparse.Namespace) -> int:
    began = time.monotonic()
    cells = spec.cells(bench, arms.BUCKETED)
    todo = [cell for cell in cells if cell.key not in log["cells"]]
    device = "cpu" if options.rehearse else "cuda"
    run = (Forked(bool(bench.parallel), device) if options.fork else Spawned()) if todo else None
    console = Console(width=None if sys.stdout.isatty() else 160)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("cells", total=len(todo))
        for cell in todo:
            if time.monotonic() - began > options.budget:
                break
            log["cells"][cell.key] = answer = run.run(spec.order(bench, cell, device, known_parity(log, cell)))
            # After every cell: what was measured outlives a time limit.
            out.write_text(json.dumps(log, indent=1) + "\n")
            progress.advance(bar)
            console.print(report.line(answer), highlight=False, soft_wrap=True)
    if run is not None:
        run.close()
    console.print(report.table(log))
    figure.draw([log], out.with_suffix(".png"))
    left = [cell for cell in cells if cell.key not in log["cells"]]
    if left:
        console.print(f"left out: {len(left)} cells; the same command runs them", highlight=False)
    bad = [key for key, answer in log["cells"].items() if {"failed", "refused", "left_out"} & answer.keys()]
    return FAILED if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
