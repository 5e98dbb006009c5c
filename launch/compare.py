"""``python -m launch.compare RECIPE OUT.json [key=value ...]``: a recipe with and without forge, side by side.

Three runs from the same initial weights: forge with an fp32 master, Megatron's own optimizer (which keeps an fp32
master too, so that the two are one recipe), and forge in the recipe's own formats. Each starts through
``python -m launch``, that is behind the gates, so that no speed is written down without its parity check.
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


def arms(recipe: config.Recipe) -> dict[str, list[str]]:
    standard = ["optimizer.use_forge=false"]
    own = recipe.optimizer.recipe
    found = {"forge, fp32-master": ["optimizer.use_forge=true", "optimizer.recipe=fp32-master"], "megatron": standard}
    if own not in (None, "fp32-master"):
        found[f"forge, {own}"] = ["optimizer.use_forge=true"]
    return found


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


def compare(name: str, out: Path, overrides: list[str]) -> int:
    recipe = config.load(name, overrides)
    report = {"recipe": name, "overrides": overrides, "provenance": provenance.describe(), "runs": {}}
    root = Path(recipe.run.dir)
    for label, changes in arms(recipe).items():
        folder = root / label.replace(", ", "-")
        command = [sys.executable, "-m", "launch", name, *overrides, *changes, f"run.dir={folder}"]
        code = subprocess.run(command).returncode
        if code:
            return code
        report["runs"][label] = asdict(read(folder, changes))
        report["after"] = provenance.gpus()
        ours, theirs = report["runs"]["forge, fp32-master"], report["runs"].get("megatron")
        if theirs is not None:
            gaps = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
            report["forge against megatron, fp32-master"] = {
                f"largest loss gap, first {EARLY} steps": max(gaps[:EARLY]),
                "largest loss gap": max(gaps),
                "step time ratio": ours["step_ms"]["median"] / theirs["step_ms"]["median"],
                "peak memory ratio": ours["peak_bytes"] / theirs["peak_bytes"],
            }
        out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
