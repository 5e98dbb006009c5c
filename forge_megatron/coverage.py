"""What is fused, and what each parameter's states cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One parameter: its name, shape, whether it is fused, how it is stepped, and its states' bytes."""

    name: str
    shape: tuple[int, ...]
    fused: bool
    how: str
    state_bytes: int


@dataclass(frozen=True)
class Coverage:
    """A table that prints itself; ``rows`` for programs."""

    rows: list[Row]

    @property
    def fused_parameters(self) -> int:
        """Coordinates whose gradient is never stored."""
        return sum(_numel(row.shape) for row in self.rows if row.fused)

    @property
    def state_bytes(self) -> int:
        return sum(row.state_bytes for row in self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        table = [("parameter", "shape", "stepped", "state bytes")]
        table += [(r.name, "×".join(map(str, r.shape)), r.how, f"{r.state_bytes:,}") for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        total = sum(_numel(row.shape) for row in self.rows)
        lines.append(f"{self.fused_parameters:,} of {total:,} parameters fused, {self.state_bytes:,} bytes of state")
        return "\n".join(lines)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
