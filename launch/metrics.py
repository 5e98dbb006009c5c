"""What a run says of itself: one JSON line a step, TensorBoard, and a progress line."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from launch.config import Recipe


@dataclass(frozen=True)
class Step:
    """One optimizer step. Loss in nats a token, rates over all ranks, memory of this rank."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Validation:
    """Validation after ``step`` optimizer steps; bits_per_byte only for the byte tokenizer."""

    step: int
    valid_loss: float
    bits_per_byte: float | None


def read(folder: Path | str, record: str) -> list[dict]:
    """The records of one kind in ``folder/metrics.jsonl``; of ``step`` and ``valid`` the last one a step."""
    lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["record"] == record]
    if record in ("step", "valid"):
        found = list({line["step"]: line for line in found}.values())
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the allocator on a GPU, peak resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if sys.platform == "darwin" else kib * 1024


class Metrics:
    """Writer of rank 0; on other ranks every method does nothing.

    ``RUN/metrics.jsonl`` holds a ``start`` record a process, ``step``, ``valid`` and ``note`` records,
    and an ``end`` record, each with its kind under ``"record"``. After a resume, lines of steps that
    are run again follow the old ones: the last line of a step counts.
    """

    def __init__(self, recipe: Recipe, rank: int, first_step: int, **start: object) -> None:
        self.active = rank == 0
        if not self.active:
            return
        self.recipe = recipe
        folder = Path(recipe.run.dir)
        self._file = (folder / "metrics.jsonl").open("a")
        self._board = None
        if recipe.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._console = Console()
        self._live = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._write("start", {"step": first_step, "time": time.time(), **start})

    def _write(self, record: str, values: dict) -> None:
        self._file.write(json.dumps({"record": record, **values}) + "\n")
        self._file.flush()

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def step(self, values: Step) -> None:
        if not self.active:
            return
        self._write("step", asdict(values))
        if self._board is not None:
            for name in ("loss", "grad_norm", "lr", "tokens_per_second"):
                self._board.add_scalar(f"train/{name}", getattr(values, name), values.step)
            self._board.add_scalar("memory/peak_bytes", values.peak_memory_bytes, values.step)
        line = (
            f"step {values.step:>6}/{self.recipe.run.steps}  loss {values.loss:.4f}  "
            f"norm {values.grad_norm:.3f}  lr {values.lr:.2e}  {values.tokens_per_second:,.0f} tokens/s  "
            f"{values.peak_memory_bytes / 2**30:.2f} GiB"
        )
        if self._live is not None:
            self._live.update(Text(line))
        if values.step % self.recipe.logging.every == 0:
            self._print(line)

    def validation(self, values: Validation) -> None:
        if not self.active:
            return
        self._write("valid", asdict(values))
        if self._board is not None:
            self._board.add_scalar("valid/loss", values.valid_loss, values.step)
        bits = "" if values.bits_per_byte is None else f"  {values.bits_per_byte:.4f} bits/byte"
        self._print(f"step {values.step:>6}  validation loss {values.valid_loss:.4f}{bits}")

    def note(self, text: str, **values: object) -> None:
        if not self.active:
            return
        self._write("note", {"text": text, **values})
        self._print(text)

    def end(self, **values: object) -> None:
        if self.active:
            self._write("end", {"time": time.time(), **values})

    def close(self) -> None:
        if not self.active:
            return
        if self._live is not None:
            self._live.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()
