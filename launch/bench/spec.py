"""What a bench file says, and the cells that it asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from launch import config
from launch.bench.layout import Layout, parse

BENCHES = config.RECIPES / "bench"


@dataclass(frozen=True)
class Bench:
    """One bench: a grid of cells, and the arms that are measured in each.

    An arm's ratios are to its own reference where it has one, otherwise to ``baseline``, of the same cell and run.
    """

    shapes: list[str] = field(default_factory=lambda: ["llama-3.1-8b"])
    batch: list[int] = field(default_factory=lambda: [1])  # of one rank and one micro-batch
    sequence: list[int] = field(default_factory=lambda: [512])
    checkpointing: list[bool] = field(default_factory=lambda: [False])
    bucket_mb: list[int] = field(default_factory=lambda: [128])  # only arms with buckets are measured at each
    arms: list[str] = field(default_factory=lambda: ["adamw-fused", "forge"])
    parallel: list[str] = field(default_factory=list)  # of arms through Megatron: degrees such as tp2-sp
    micro_batches: list[int] = field(default_factory=lambda: [1])  # of a step, through Megatron
    experts: list[int] = field(default_factory=lambda: [0])  # of each layer, through Megatron; 0: a dense MLP
    liger: list[bool] = field(default_factory=lambda: [False])  # Liger's kernels, in the models of all arms
    baseline: str = "adamw-fused"
    world_size: int = 1  # GPUs; more than 1: ranks that share the batch
    warm_up: int = 5
    steps: int = 20
    runs: int = 1
    lr: float = 1e-5
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm on a shape, a batch and a sequence, for the given time."""

    shape: str
    arm: str
    batch: int
    sequence: int
    checkpointing: bool = False
    bucket_mb: int | None = None
    run: int = 0
    parallel: str | None = None
    micro_batches: int = 1
    experts: int = 0
    liger: bool = False

    @property
    def place(self) -> str:
        """What its baseline shares with it."""
        parts = [self.shape]
        parts += [f"e{self.experts}"] if self.experts else []
        parts += [f"b{self.batch}", f"s{self.sequence}"]
        parts += [f"m{self.micro_batches}"] if self.micro_batches > 1 else []
        parts += [self.parallel] if self.parallel is not None else []
        return "/".join(parts + ["checkpointing"] * self.checkpointing + ["liger"] * self.liger)

    def layout(self, world_size: int) -> Layout | None:
        """Over Megatron's ranks; None: the arm is not through Megatron."""
        if self.parallel is None:
            return None
        parallel = parse(self.parallel, world_size)
        return Layout(parallel, self.micro_batches, self.experts, recompute=self.checkpointing)

    @property
    def through(self) -> tuple:
        """Of cells of one arm on one kind of model, those with the same have one check."""
        return self.parallel, self.micro_batches, self.experts > 0, self.liger

    @property
    def key(self) -> str:
        bucket = "" if self.bucket_mb is None else f"/{self.bucket_mb}MB"
        return f"{self.place}/{self.arm}{bucket}/r{self.run}"


def load(name: str, overrides: list[str]) -> Bench:
    """Read ``recipes/bench/NAME.yaml``, or a path, with ``key=value`` overrides.

    Raises:
        launch.config.RecipeError: an unknown key or a wrong type; fewer timed steps than have quartiles.
    """
    bench = config.load(name, overrides, Bench, BENCHES)
    if bench.steps < 2:
        raise config.RecipeError("steps", f"{bench.steps} has no quartiles; time at least 2")
    return bench


def cells(bench: Bench, bucketed: set[str] = frozenset()) -> list[Cell]:
    """Arms of one place beside each other, so that a cut run still has whole comparisons.

    Args:
        bucketed: the arms that are measured at every ``bucket_mb``.
    """
    places = product(
        range(bench.runs), bench.shapes, bench.liger, bench.checkpointing, bench.sequence, bench.batch,
        bench.experts, bench.micro_batches, bench.parallel or [None],
    )  # fmt: skip
    return [
        Cell(shape, arm, batch, sequence, checkpointing, bucket, run, parallel, micro_batches, experts, liger)
        for run, shape, liger, checkpointing, sequence, batch, experts, micro_batches, parallel in places
        for arm in bench.arms
        for bucket in (bench.bucket_mb if arm in bucketed else [None])
    ]


def order(bench: Bench, cell: Cell, device: str, parity: dict | None = None) -> dict:
    """What a cell's process is told; ``parity``: what the same arm's was, with the same sources."""
    return {"bench": asdict(bench), "cell": asdict(cell), "device": device, "parity": parity}


def find_out(name: str) -> Path:
    """Where results go if nothing is said: next to the bench's file, by its name."""
    return BENCHES / "results" / f"{Path(name).stem}.json"
