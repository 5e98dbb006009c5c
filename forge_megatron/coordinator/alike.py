"""What must be equal on every rank: an error on all of them that names the first thing which is not."""

from __future__ import annotations

from collections.abc import Sequence


class Disagreement(ValueError):
    """The ranks do not do the same; raised on every one of them."""


def expect_alike(what: str, everywhere: Sequence[dict[str, object]], members: Sequence[int]) -> None:
    """Compares what every rank has told.

    Args:
        what: the ranks do.
        everywhere: each rank's facts, by the same names.
        members: the ranks, in the same order.

    Raises:
        Disagreement: names the first fact that differs, with the ranks' values; of lists, their first elements that do.
    """
    for name in everywhere[0]:
        values = list(map(repr, _where_they_differ([theirs.get(name) for theirs in everywhere])))
        if len(set(values)) > 1:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in zip(members, values, strict=True))
            raise Disagreement(f"{what}: {name}: different on the ranks ({told}); give every rank the same")


def _where_they_differ(values: list) -> list:
    while all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        differing = [each for each in zip(*values, strict=True) if len(set(map(repr, each))) > 1]
        if not differing:
            break
        values = list(differing[0])
    return values
