"""The table of a bench's results file."""

from __future__ import annotations

import statistics

from rich.table import Table

from launch.bench.spec import Cell

GIB = 2**30
#: Of the owned weights' bytes: what two allocators may differ by in scratch and cuBLAS's workspaces.
SCRATCH = 0.01
BAD = ("failed", "refused", "left_out", "out_of_memory")


def line(answer: dict) -> str:
    """One cell as one line."""
    key = Cell(**answer["cell"]).key
    for bad in BAD:
        if bad in answer:
            return f"{key}: {bad.replace('_', ' ')}: {answer[bad]}"
    phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in answer["ms"].items())
    distance = answer["parity"]["distance"]
    parity = "the judge" if distance is None else f"parity {distance:.1e}"
    if answer.get("approximate"):
        parity += ", approximate"
    return f"{key}: {phases} ms, peak {answer['peak_bytes'] / GIB:.2f} GiB, {parity}"


def arm_name(cell: Cell) -> str:
    return cell.arm if cell.bucket_mb is None else f"{cell.arm}, {cell.bucket_mb} MB"


def merged(log: dict) -> dict[str, dict[str, dict]]:
    """``place -> arm -> {"ms", "spread_ms", "peak_bytes", "against", ...}``, the median over runs; or its ``note``."""
    grid: dict[str, dict[str, list[dict]]] = {}
    for answer in log["cells"].values():
        cell = Cell(**answer["cell"])
        grid.setdefault(cell.place, {}).setdefault(arm_name(cell), []).append(answer)
    return {place: {arm: _merge(answers) for arm, answers in row.items()} for place, row in grid.items()}


def _merge(answers: list[dict]) -> dict:
    good = [answer for answer in answers if "ms" in answer]
    if not good:
        return {"note": next(bad.replace("_", " ") for bad in BAD if bad in answers[0])}
    steps = [answer["ms"]["step"] for answer in good]
    return {
        "ms": statistics.median(steps),
        "spread_ms": statistics.stdev(steps) if len(steps) > 1 else None,
        "peak_bytes": max(answer["peak_bytes"] for answer in good),
        "least_peak_bytes": min(min(answer.get("ranks_peak_bytes", [answer["peak_bytes"]])) for answer in good),
        "against": good[0]["against"],
        "approximate": good[0].get("approximate", False),
        "phases": good[0]["ms"],
        "pools": good[0].get("pools"),
        "owned_weight_bytes": good[0].get("owned_weight_bytes"),
        "timeline": good[0].get("timeline", []),
        "held": good[0].get("requested_bytes") or end_of_backward(good[0]),
    }


def reference_of(row: dict[str, dict], arm: str) -> dict:
    """What the ratios of an arm are to: its reference with the same bucket, or the fastest of its reference's."""
    against = row[arm].get("against")
    bucket = arm.partition(", ")[2]
    named = row.get(f"{against}, {bucket}" if bucket else against)
    if named is not None and "ms" in named:
        return named
    others = [cell for name, cell in row.items() if name.partition(", ")[0] == against and "ms" in cell]
    return min(others, key=lambda cell: cell["ms"], default={})


def end_of_backward(cell: dict) -> int | None:
    return next((held for what, held in cell.get("timeline", ()) if what == "end of backward"), None)


def removed(row: dict[str, dict], arm: str) -> tuple[int, int, bool] | None:
    """The bytes that the arm's reference has at the end of backward and the arm has not, beside its owned weights'.

    Weights and states aside. None where nothing is owned, or the reference has no number, owns weights as well, or is
    a graph where the arm is none.

    Returns:
        as tensors asked for them; ``owned_weight_bytes``; whether they are the same within ``SCRATCH`` and the live
        gradients of the two differ by exactly that.
    """
    cell, base = row[arm], reference_of(row, arm)
    if not cell.get("owned_weight_bytes") or not base or base.get("owned_weight_bytes"):
        return None
    # A graph's memory stays allocated.
    if cell["phases"].keys() != base["phases"].keys() or None in (base["held"], cell["held"]):
        return None
    beside = [one["held"] - one["pools"]["weights"] - one["pools"]["states"] for one in (base, cell)]
    live, owned = beside[0] - beside[1], cell["owned_weight_bytes"]
    same = base["pools"]["gradients"] - cell["pools"]["gradients"] == owned
    return live, owned, same and abs(live - owned) <= SCRATCH * owned


def _removed(row: dict[str, dict], arm: str) -> str:
    found = removed(row, arm)
    if found is None:
        return ""
    live, owned, same = found
    return f"{live / GIB:.2f} {'=' if same else '≠'} {owned / GIB:.2f}"


def peak(cell: dict) -> str:
    """GiB, of the rank with the least and of the rank with the most where they differ."""
    least, most = (f"{cell[of] / GIB:.2f}" for of in ("least_peak_bytes", "peak_bytes"))
    return most if least == most else f"{least} to {most}"


def _where(log: dict) -> str:
    gpus, world = log["provenance"]["gpus"], log["bench"].get("world_size", 1)
    return f"{world} × {gpus[0]['name']}" if gpus else "a rehearsal on a CPU: no number is a measurement"


def table(*logs: dict) -> Table:
    """Every arm of every place of these files, with its ratios to its reference in the same run; peaks are a rank's.

    "removed": what is gone at the end of backward, = or ≠ the bytes of the weights that FORGE owns.
    """
    where = ", ".join(dict.fromkeys(map(_where, logs)))
    drawn = Table(title=f"{where}; ratios to 'against' in the same run", title_justify="left")
    for column in ("cell", "arm", "step ms", "×", "peak GiB", "×", "end of backward GiB", "removed", "against"):
        drawn.add_column(column, justify="left" if column in ("cell", "arm", "against") else "right")
    for place, row in (item for log in logs for item in merged(log).items()):
        for index, (arm, cell) in enumerate(row.items()):
            first = place if not index else ""
            if "ms" not in cell:
                drawn.add_row(first, arm, cell["note"], "", "", "", "", "")
                continue
            base = reference_of(row, arm)
            ratios = [f"{cell[of] / base[of]:.3f}" if base else "" for of in ("ms", "peak_bytes")]
            spread = f" ± {cell['spread_ms']:.1f}" if cell["spread_ms"] is not None else ""
            held = end_of_backward(cell)
            drawn.add_row(
                first,
                f"{arm} (approximate)" if cell["approximate"] else arm,
                f"{cell['ms']:.1f}{spread}",
                ratios[0],
                peak(cell),
                ratios[1],
                "" if held is None else f"{held / GIB:.2f}",
                _removed(row, arm),
                cell["against"],
            )
        drawn.add_section()
    return drawn
