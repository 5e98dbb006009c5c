"""``python -m launch.compare RECIPE OUT.json [key=value ...]``: a recipe with and without forge, side by side.

Pairs of runs from the same initial weights, forge and Megatron's own optimizer in the same formats: the recipe's, and
an fp32 master. Each starts through ``python -m launch``, that is behind the gates, so that no speed is written down
without its parity check.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from launch import config, metrics, provenance

EARLY = 20
WARM_UP = 10


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        overrides: what was changed in the recipe.
        losses: training loss by step, nats a token.
        valid_loss: the last validation loss.
        peak_bytes: the allocator's peak on rank 0.
        gradient_bytes: gradients alive at the end of backward, rank 0.
        step_ms: median and quartiles of a step after the first WARM_UP, checkpoint and validation left out.
    """

    overrides: list[str]
    losses: list[float]
    valid_loss: float
    peak_bytes: int
    gradient_bytes: int
    step_ms: dict[str, float]


def formats(recipe: config.Recipe) -> list[str]:
    """The pairs to run, by their recipe of formats."""
    return [kept for kept in dict.fromkeys([recipe.optimizer.recipe, "fp32-master"]) if kept]


def read(folder: Path, overrides: list[str]) -> Run:
    steps = metrics.read(folder, "step")
    timed = [step["seconds"] * 1e3 for step in steps[WARM_UP:]]
    low, median, high = statistics.quantiles(timed, n=4)
    return Run(
        overrides=overrides,
        losses=[step["loss"] for step in steps],
        valid_loss=metrics.read(folder, "valid")[-1]["valid_loss"],
        peak_bytes=max(step["peak_memory_bytes"] for step in steps),
        gradient_bytes=metrics.read(folder, "end")[-1]["gradient_bytes"],
        step_ms={"median": round(median, 3), "lower_quartile": round(low, 3), "upper_quartile": round(high, 3)},
    )


def against(forge: Run, megatron: Run) -> dict[str, float]:
    gaps = [abs(ours - theirs) for ours, theirs in zip(forge.losses, megatron.losses, strict=True)]
    return {
        f"largest loss gap, first {EARLY} steps": max(gaps[:EARLY]),
        "largest loss gap": max(gaps),
        "step time": forge.step_ms["median"] / megatron.step_ms["median"],
        "peak memory": forge.peak_bytes / megatron.peak_bytes,
    }


def compare(name: str, out: Path, overrides: list[str]) -> int:
    recipe = config.load(name, overrides)
    report = {"recipe": name, "overrides": overrides, "provenance": provenance.describe(), "runs": {}}
    root = Path(recipe.run.dir)
    for kept in formats(recipe):
        pair = {}
        for label, use_forge in (("megatron", "false"), ("forge", "true")):
            folder = root / kept / label
            changes = [f"optimizer.recipe={kept}", f"optimizer.use_forge={use_forge}"]
            command = [sys.executable, "-m", "launch", name, *overrides, *changes, f"run.dir={folder}"]
            code = subprocess.run(command).returncode
            if code:
                return code
            pair[label] = read(folder, changes)
        report["runs"][kept] = {label: asdict(run) for label, run in pair.items()} | {"forge/megatron": against(**pair)}
        report["after"] = provenance.gpus()
        out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return compare(argv[0], Path(argv[1]), argv[2:])
    except config.RecipeError as error:
        print(f"launch.compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
