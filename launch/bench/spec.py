"""What a bench file says, and the cells that it asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from launch import config

BENCHES = config.RECIPES / "bench"


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer by its numbers; Hugging Face's names. No weights are loaded."""

    kind: str = "llama"  # or qwen3, gpt2
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 512
    tie_word_embeddings: bool = False
    dtype: str = "bf16"  # or fp32


@dataclass(frozen=True)
class Bench:
    """One bench: a model, a grid of cells, and the arms that are measured in each."""

    model: Shape = field(default_factory=Shape)
    batch: list[int] = field(default_factory=lambda: [1])
    sequence: list[int] = field(default_factory=lambda: [512])
    arms: list[str] = field(default_factory=lambda: ["adamw-fused", "forge"])
    baseline: str = "adamw-fused"  # ratios are to this arm, in the same run
    warm_up: int = 5
    steps: int = 20
    runs: int = 1
    checkpointing: bool = False
    lr: float = 1e-5
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Cell:
    """One process: an arm at a batch and a sequence, for the given time."""

    arm: str
    batch: int
    sequence: int
    run: int

    @property
    def key(self) -> str:
        return f"{self.arm}/b{self.batch}/s{self.sequence}/r{self.run}"


def load(name: str, overrides: list[str]) -> Bench:
    """Read ``recipes/bench/NAME.yaml``, or a path, with ``key=value`` overrides.

    Raises:
        launch.config.RecipeError: an unknown key or a wrong type.
    """
    return config.load(name, overrides, Bench, BENCHES)


def cells(bench: Bench) -> list[Cell]:
    """Arms of one batch and sequence beside each other, so that a cut run still has whole comparisons."""
    grid = product(range(bench.runs), bench.sequence, bench.batch, bench.arms)
    return [Cell(arm, batch, sequence, run) for run, sequence, batch, arm in grid]


def order(bench: Bench, cell: Cell) -> dict:
    """What a cell's process is told."""
    return {"bench": asdict(bench), "cell": asdict(cell)}


def find_out(name: str) -> Path:
    """Where results go if nothing is said: next to the bench's file, by its name."""
    return BENCHES / "results" / f"{Path(name).stem}.json"
