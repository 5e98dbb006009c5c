"""The table and the figure of a bench's results file."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.table import Table

GIB = 2**30


def line(key: str, answer: dict) -> str:
    """One cell as one line."""
    for bad in ("failed", "refused", "left_out", "out_of_memory"):
        if bad in answer:
            return f"{key}: {bad.replace('_', ' ')}: {answer[bad]}"
    phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in answer["ms"].items())
    return f"{key}: {phases} ms, peak {answer['peak_bytes'] / GIB:.2f} GiB, parity {answer['parity']['distance']:.1e}"


def merged(log: dict) -> dict[tuple[int, int], dict[str, dict]]:
    """``(batch, sequence) -> arm -> {"ms", "spread_ms", "peak_bytes"}``, the median over runs."""
    grid: dict[tuple[int, int], dict[str, list[dict]]] = {}
    for key, answer in log["cells"].items():
        arm, batch, sequence, _ = key.split("/")
        grid.setdefault((int(batch[1:]), int(sequence[1:])), {}).setdefault(arm, []).append(answer)
    return {place: {arm: _merge(answers) for arm, answers in row.items()} for place, row in grid.items()}


def _merge(answers: list[dict]) -> dict:
    good = [answer for answer in answers if "ms" in answer]
    if not good:
        return {"note": line("", answers[0])[2:].split(":")[0]}
    steps = [answer["ms"]["step"] for answer in good]
    spread = statistics.stdev(steps) if len(steps) > 1 else None
    peak = max(answer["peak_bytes"] for answer in good)
    return {"ms": statistics.median(steps), "spread_ms": spread, "peak_bytes": peak, "phases": good[0]["ms"]}


def table(log: dict) -> Table:
    """Every arm of every cell, with its ratios to the baseline of the same cell."""
    baseline = log["bench"]["baseline"]
    gpu = log["provenance"]["gpus"][0]["name"] if log["provenance"]["gpus"] else "no GPU"
    drawn = Table(title=f"{gpu}; ratios to {baseline} in the same run", title_justify="left")
    for column in ("batch × sequence", "arm", "step ms", "× baseline", "peak GiB", "× baseline"):
        drawn.add_column(column, justify="left" if column in ("batch × sequence", "arm") else "right")
    for (batch, sequence), row in merged(log).items():
        base = row.get(baseline, {})
        for index, (arm, cell) in enumerate(row.items()):
            place = f"{batch} × {sequence}" if not index else ""
            if "ms" not in cell:
                drawn.add_row(place, arm, cell["note"], "", "", "")
                continue
            ratios = [f"{cell[of] / base[of]:.3f}" if of in base else "" for of in ("ms", "peak_bytes")]
            spread = f" ± {cell['spread_ms']:.1f}" if cell["spread_ms"] is not None else ""
            peak = f"{cell['peak_bytes'] / GIB:.2f}"
            drawn.add_row(place, arm, f"{cell['ms']:.1f}{spread}", ratios[0], peak, ratios[1])
        drawn.add_section()
    return drawn


def plot(log: dict, out: Path) -> None:
    """Step time and peak of every cell, and the memory within a step of the first."""
    from matplotlib.figure import Figure

    grid = merged(log)
    if not any("ms" in cell for row in grid.values() for cell in row.values()):
        return
    figure = Figure(figsize=(15, 3.2 * len(grid) + 1), layout="constrained")
    axes = figure.subplots(len(grid), 3, squeeze=False)
    for drawn, ((batch, sequence), row) in zip(axes, grid.items(), strict=True):
        arms = [arm for arm, cell in row.items() if "ms" in cell]
        left = [0.0] * len(arms)
        for phase in ("forward", "backward", "optimizer"):
            widths = [row[arm]["phases"].get(phase, 0.0) for arm in arms]
            drawn[0].barh(arms, widths, left=left, label=phase)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        whole = [arm for arm in arms if "forward" not in row[arm]["phases"]]
        drawn[0].barh(whole, [row[arm]["ms"] for arm in whole], label="one graph")
        drawn[0].set(title=f"step, ms (batch {batch}, sequence {sequence})")
        drawn[0].legend(fontsize=7)
        drawn[1].barh(arms, [row[arm]["peak_bytes"] / GIB for arm in arms], color="tab:gray")
        drawn[1].set(title="peak, GiB")
        for arm in arms:
            timeline = log["cells"].get(f"{arm}/b{batch}/s{sequence}/r0", {}).get("timeline")
            if timeline:
                drawn[2].plot([held / GIB for _, held in timeline], label=arm, linewidth=1)
        drawn[2].set(title="allocated within a step, GiB", xlabel="layer forward, layer backward, optimizer")
        if drawn[2].lines:
            drawn[2].legend(fontsize=7)
    figure.savefig(out, dpi=110)
