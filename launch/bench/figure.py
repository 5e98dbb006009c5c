"""Figures of results files: step time by phase, peak memory by pool, and the memory within a step."""

from __future__ import annotations

from pathlib import Path

from launch.bench.report import GIB, merged

POOLS = ("weights", "states", "gradients")
PHASES = ("forward", "backward", "forward, backward", "optimizer")


def panels(logs: list[dict]) -> dict[str, dict[str, dict]]:
    """``place -> arm -> numbers`` of all files; of an arm that several have in one place, the last file's."""
    found: dict[str, dict[str, dict]] = {}
    for log in logs:
        for place, row in merged(log).items():
            found.setdefault(place, {}).update({arm: cell for arm, cell in row.items() if "ms" in cell})
    return {place: row for place, row in found.items() if row}


def draw(logs: list[dict], out: Path, places: list[str] | None = None) -> bool:
    """A row of three panels a place; False if nothing was measured.

    Args:
        logs: contents of results files.
        out: a PNG.
        places: only these, such as ``llama-3.1-8b/b1/s512``; None: all.
    """
    from matplotlib.figure import Figure

    rows = {place: row for place, row in panels(logs).items() if places is None or place in places}
    if not rows:
        return False
    height = sum(1.3 + 0.28 * max(4, len(row)) for row in rows.values())
    figure = Figure(figsize=(16, height + 0.4), layout="constrained")
    ratios = [max(4, len(row)) for row in rows.values()]
    grid = figure.subplots(len(rows), 3, squeeze=False, gridspec_kw={"height_ratios": ratios})
    for axes, (place, row) in zip(grid, rows.items(), strict=True):
        _times(axes[0], place, row)
        _pools(axes[1], row)
        _timeline(axes[2], row)
    gpus = logs[-1]["provenance"]["gpus"]
    what = gpus[0]["name"] if gpus else "a rehearsal on a CPU: no number is a measurement"
    figure.suptitle(f"{what}, torch {logs[-1]['provenance']['versions']['torch']}", fontsize=9)
    figure.savefig(out, dpi=100)
    return True


def stacked(cell: dict) -> dict[str, float]:
    """GiB of each pool; what the peak has above them is activations, logits and workspaces."""
    pools = cell["pools"]
    if not pools:
        return {"peak": cell["peak_bytes"] / GIB}
    parts = {pool: pools[pool] / GIB for pool in POOLS}
    return parts | {"activations, workspaces": max(0.0, cell["peak_bytes"] / GIB - sum(parts.values()))}


def _bars(axis, row: dict[str, dict], parts: dict[str, dict[str, float]], totals: list[float]) -> None:
    """Horizontal bars, one an arm, stacked of its parts, with its total beside it."""
    names = list(dict.fromkeys(name for each in parts.values() for name in each))
    left = dict.fromkeys(row, 0.0)
    for name in names:
        widths = [parts[arm].get(name, 0.0) for arm in row]
        axis.barh(list(row), widths, left=list(left.values()), label=name)
        left = {arm: left[arm] + width for arm, width in zip(row, widths, strict=True)}
    for index, (end, total) in enumerate(zip(left.values(), totals, strict=True)):
        axis.text(end, index, f" {total:.1f}", va="center", fontsize=7)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0.0, -0.06 - 0.3 / len(row)), ncols=4)


def _times(axis, place: str, row: dict[str, dict]) -> None:
    parts = {}
    for arm, cell in row.items():
        phases = {phase: cell["phases"][phase] for phase in PHASES if phase in cell["phases"]}
        parts[arm] = phases or {"one graph": cell["ms"]}
    _bars(axis, row, parts, [cell["ms"] for cell in row.values()])
    axis.set_title(f"{place}: step, ms", fontsize=9)


def _pools(axis, row: dict[str, dict]) -> None:
    totals = [cell["peak_bytes"] / GIB for cell in row.values()]
    _bars(axis, row, {arm: stacked(cell) for arm, cell in row.items()}, totals)
    axis.set_title("peak, GiB", fontsize=9)


def _timeline(axis, row: dict[str, dict]) -> None:
    for arm, cell in row.items():
        # A captured arm's eager step lies on top of its graph's memory.
        if cell["timeline"] and cell["phases"].keys() > {"step"}:
            axis.plot([held / GIB for _, held in cell["timeline"]], label=arm, linewidth=1.2)
    axis.set_title("allocated within a step, GiB", fontsize=9)
    axis.set_xlabel("after each layer's forward, each layer's backward, the optimizer", fontsize=8)
    axis.tick_params(labelsize=8)
    if axis.lines:
        axis.legend(fontsize=7)
