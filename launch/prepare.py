"""Text files to Megatron's indexed datasets, offline and always in the same order.

    python -m launch.prepare --stdlib OUT          the Python standard library's own sources
    python -m launch.prepare --text FILE... --out OUT [--tokenizer NAME]

writes ``OUT/train.{bin,idx}``, ``OUT/valid.{bin,idx}`` and ``OUT/data.json``: one document a file,
each ended by the end-of-document token. Every ``--valid-every``-th document is held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from math import log2
from pathlib import Path

import numpy

from launch import quiet
from launch.tokenizer import build_tokenizer

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


def stdlib_sources() -> list[Path]:
    """The standard library's ``.py`` files, in name order, without tests and third-party code."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def entropy_bits(counts: Counter) -> float:
    """Bits a symbol of the best model that knows only the symbols' frequencies."""
    total = sum(counts.values())
    return -sum(n / total * log2(n / total) for n in counts.values())


def _split(files: Iterable[Path], every: int) -> Iterator[tuple[str, Path]]:
    for number, path in enumerate(files):
        yield ("valid" if number % every == every - 1 else "train"), path


def prepare(files: list[Path], out: Path, tokenizer_name: str = "byte", valid_every: int = 20):
    """Write the two datasets and ``data.json``.

    Returns:
        The description also written to ``data.json``: documents and tokens of each split, the
        validation bytes' unigram entropy in bits, and a SHA-256 of the token files.

    Raises:
        ValueError: no document would be left in a split, or there is no such tokenizer.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    if not 2 <= valid_every <= len(files):
        raise ValueError(
            f"--valid-every={valid_every} with {len(files)} files leaves a split empty: "
            f"between 2 and the number of files"
        )
    try:
        tokenizer = build_tokenizer(tokenizer_name)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"--tokenizer={tokenizer_name}: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    prefixes = {split: out / split for split in ("train", "valid")}
    builders = {s: IndexedDatasetBuilder(f"{p}.bin.part", dtype) for s, p in prefixes.items()}
    statistics = {split: {"documents": 0, "tokens": 0} for split in prefixes}
    counts: Counter = Counter()
    for split, path in _split(files, valid_every):
        text = path.read_bytes()
        if split == "valid":
            counts.update(text)
        tokens = numpy.append(tokenizer.encode(text), tokenizer.eod)
        builders[split].add_document(tokens, [len(tokens)])
        statistics[split]["documents"] += 1
        statistics[split]["tokens"] += len(tokens)
    digest = hashlib.sha256()
    for split, prefix in prefixes.items():
        builders[split].finalize(f"{prefix}.idx.part")
        digest.update(Path(f"{prefix}.bin.part").read_bytes())
        for suffix in ("bin", "idx"):
            os.replace(f"{prefix}.{suffix}.part", f"{prefix}.{suffix}")
    description = {
        "tokenizer": tokenizer.unique_identifiers,
        "vocab_size": tokenizer.vocab_size,
        "splits": statistics,
        "valid_unigram_bits_per_byte": entropy_bits(counts),
        "sha256": digest.hexdigest(),
    }
    (out / "data.json").write_text(json.dumps(description, indent=2) + "\n")
    return description


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.prepare", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--stdlib", metavar="OUT", type=Path)
    source.add_argument("--text", metavar="FILE", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="folder for --text")
    parser.add_argument("--tokenizer", default="byte", help="byte, or a Hugging Face name")
    parser.add_argument("--valid-every", type=int, default=20)
    arguments = parser.parse_args(argv)
    out = arguments.stdlib or arguments.out
    if out is None:
        parser.error("--text needs --out")
    quiet.hush()
    files = stdlib_sources() if arguments.stdlib else arguments.text
    try:
        description = prepare(files, out, arguments.tokenizer, arguments.valid_every)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    json.dump(description, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
