"""``python -m launch.demo``: a small GPT trained with forge, with the standard optimizer, and compared.

Three runs of one recipe from the same initial weights: with forge; with Megatron's optimizer; and the
latter with every sum over samples and channels in another order, which says how far apart two runs
drift by rounding alone. Forge must stay within that. Exit code 1 where it does not, or where the model
did not learn.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from numpy import allclose
from rich.console import Console
from rich.table import Table

from launch import config, metrics

EARLY, EARLY_GAP = 20, 2e-6
LEARNED = 0.8  # of the bytes' unigram entropy
ARMS = {
    "forge": ["optimizer.use_forge=true"],
    "standard": ["optimizer.use_forge=false"],
    "standard, reordered": ["optimizer.use_forge=false", "run.reorder=true", "logging.tensorboard=false"],
}


@dataclass(frozen=True)
class Arm:
    """One run, read from its metrics. Losses in nats a token by step."""

    losses: dict[int, float]
    bits_per_byte: float
    gradient_bytes: int
    weights: list[float]
    step_seconds: float

    @classmethod
    def read(cls, folder: Path) -> Arm:
        steps = metrics.read(folder, "step")
        seconds = sorted(step["seconds"] for step in steps)
        return cls(
            losses={step["step"]: step["loss"] for step in steps},
            bits_per_byte=metrics.read(folder, "valid")[-1]["bits_per_byte"],
            gradient_bytes=metrics.read(folder, "end")[-1]["gradient_bytes"],
            weights=metrics.read(folder, "start")[-1]["weights"],
            step_seconds=seconds[len(seconds) // 2],
        )


def gaps(one: Arm, other: Arm) -> tuple[float, float]:
    """The largest distance of two loss curves in the first ``EARLY`` steps, and after them; NaN is infinitely far."""
    gap = {step: abs(loss - other.losses[step]) for step, loss in one.losses.items()}
    gap = {step: math.inf if math.isnan(value) else value for step, value in gap.items()}
    early = max(value for step, value in gap.items() if step <= EARLY)
    return early, max(value for step, value in gap.items() if step > EARLY)


def prepare(prefix: Path) -> dict:
    """The standard library's sources as an indexed dataset, and what was written about it."""
    described = prefix.parent / "data.json"
    if not described.is_file():
        command = [sys.executable, "-m", "launch.prepare", "--stdlib", str(prefix.parent)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(described.read_text())


def plot(path: Path, arms: dict[str, Arm], unigram_bits: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, distance) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    for (name, arm), style in zip(arms.items(), ("-", "--", ":"), strict=True):
        curves.plot(arm.losses.keys(), [loss / math.log(2) for loss in arm.losses.values()], style, label=name)
        if name != "standard":
            gap = [abs(loss - arms["standard"].losses[step]) for step, loss in arm.losses.items()]
            distance.plot(arm.losses.keys(), gap, style, label=f"{name} - standard")
    curves.axhline(unigram_bits, color="grey", linewidth=0.8, label="unigram entropy of the validation bytes")
    curves.set_ylabel("training loss, bits a byte")
    distance.set_ylabel("distance, nats")
    distance.set_xlabel("step")
    distance.set_yscale("symlog", linthresh=1e-7)
    for axes in (curves, distance):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _tables(console: Console, arms: dict[str, Arm]) -> None:
    curves = Table(title="training loss, nats a byte", title_justify="left")
    sizes = Table(title="at the end", title_justify="left")
    for table, first in ((curves, "step"), (sizes, "")):
        table.add_column(first)
        for name in arms:
            table.add_column(name, justify="right")
    steps = sorted(arms["forge"].losses)
    for step in sorted({1, 2, 5, 10, EARLY, *steps[49::50], steps[-1]} & set(steps)):
        curves.add_row(str(step), *(f"{arm.losses[step]:.7f}" for arm in arms.values()))
    sizes.add_row("validation, bits a byte", *(f"{arm.bits_per_byte:.4f}" for arm in arms.values()))
    sizes.add_row("gradient kept, bytes a rank", *(f"{arm.gradient_bytes:,}" for arm in arms.values()))
    sizes.add_row("median step, ms", *(f"{arm.step_seconds * 1e3:.0f}" for arm in arms.values()))
    console.print(curves)
    console.print(sizes)


def verdicts(arms: dict[str, Arm], unigram_bits: float) -> list[tuple[bool, str]]:
    forge, standard, reordered = arms.values()
    early, late = gaps(forge, standard)
    own_early, own_late = gaps(reordered, standard)
    return [
        (
            forge.weights == standard.weights and allclose(reordered.weights, standard.weights, rtol=1e-12),
            "all runs begin with the same weights",
        ),
        (early <= EARLY_GAP, f"forge - standard, first {EARLY} steps: {early:.1e} (at most {EARLY_GAP:.0e})"),
        (
            late <= own_late,
            f"forge - standard, afterwards: {late:.1e} (at most {own_late:.1e}, what reordering the standard run's "
            f"sums gives; in its first {EARLY} steps {own_early:.1e})",
        ),
        (
            forge.bits_per_byte <= LEARNED * unigram_bits,
            f"validation: {forge.bits_per_byte:.3f} bits a byte (at most {LEARNED} of the unigram entropy "
            f"{unigram_bits:.3f})",
        ),
        (
            forge.gradient_bytes < standard.gradient_bytes,
            f"gradient kept: {forge.gradient_bytes:,} bytes a rank with forge (norms), "
            f"{standard.gradient_bytes:,} without",
        ),
    ]


def train(overrides: list[str], folder: Path) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "launch", "demo", *overrides, f"run.dir={folder}"]
    return subprocess.run(command).returncode


def main(argv: list[str]) -> int:
    console = Console()
    begun = time.monotonic()
    try:
        recipe = config.load("demo", argv)
    except config.RecipeError as error:
        print(f"launch.demo: {error}", file=sys.stderr)
        return 2
    root = Path(recipe.run.dir)
    described = prepare(Path(recipe.data.train[0]))
    arms = {}
    for name, overrides in ARMS.items():
        console.rule(name)
        folder = root / name.replace(", ", "-")
        code = train([*argv, *overrides], folder)
        if code:
            return code
        arms[name] = Arm.read(folder)
    console.rule("comparison")
    unigram_bits = described["valid_unigram_bits_per_byte"]
    plot(root / "curves.png", arms, unigram_bits)
    _tables(console, arms)
    found = verdicts(arms, unigram_bits)
    for passed, text in found:
        console.print(f"[{'green]pass' if passed else 'red]FAIL'}[/] {text}", highlight=False, soft_wrap=True)
    console.print(f"curves: {root / 'curves.png'}; {time.monotonic() - begun:.0f} s in all", highlight=False)
    return 0 if all(passed for passed, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
