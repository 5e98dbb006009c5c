"""Tunes single linears of the benches' models with ``forge.tune``, and prints untuned and tuned µs, on one GPU.

``python recipes/bench/tune.py --out FILE.json [--models Llama-3.1-8B,Qwen3-4B] [--tokens 512,2048]`` from the
repository's root. The files of what was found go into a folder that is thrown away.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import forge_megatron as forge  # noqa: E402
from forge_megatron.kernels.tuning_files import source_hash  # noqa: E402
from recipes.bench.kernels import MODELS, gpu_state  # noqa: E402


def linears(models: list[str]) -> nn.ModuleList:
    """Each shape once, bf16, without initial values that mean anything."""
    shapes = dict.fromkeys(shape for model in models for shape in MODELS[model])
    with torch.device("cuda"):
        return nn.ModuleList(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for rows, columns in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="Llama-3.1-8B,Qwen3-4B")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--recipe", default=None)
    options = parser.parse_args()
    optimizer = forge.attach(linears(options.models.split(",")), "adamw", lr=1e-3, recipe=options.recipe)
    # cuBLAS keeps a workspace from its first product on.
    first = next(iter(optimizer.owned))
    torch.mm(first[:16], first[:16].t(), out_dtype=torch.float32)
    torch.cuda.synchronize()
    memory, began, before = torch.cuda.memory_allocated(), time.time(), gpu_state()
    with tempfile.TemporaryDirectory() as folder:
        found = forge.tune(optimizer, map(int, options.tokens.split(",")), folder=folder)
    seconds = time.time() - began
    rows = []
    for cell, outcome in found.outcomes.items():
        untuned, taken = (outcome.us.get(str(each), math.nan) for each in (outcome.default, outcome.chosen))
        fastest = min(outcome.us, key=outcome.us.get, default=str(outcome.default))
        rows.append(
            {
                "shape": cell.shape,
                "tokens": cell.tokens,
                "untuned": str(outcome.default),
                "tuned": str(outcome.chosen),
                "us": outcome.us,
                "left_out": outcome.left_out,
            }
        )
        print(
            f"{cell.shape[0]:>6}x{cell.shape[1]:<6}T={cell.tokens:<5} {outcome.default!s:<14} {untuned:7.1f} -> "
            f"{outcome.chosen!s:<14} {taken:7.1f} µs ({taken / untuned:.3f}), fastest {fastest}; left out "
            + (", ".join(f"{name} ({reason})" for name, reason in outcome.left_out.items()) or "none")
        )
    ratios = [row["us"][row["tuned"]] / row["us"][row["untuned"]] for row in rows if row["us"]]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
    log = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "source": source_hash(),
        "gpu_before": before,
        "gpu_after": gpu_state(),
        "recipe": options.recipe,
        "seconds": seconds,
        "kept_bytes": torch.cuda.memory_allocated() - memory,
        "tuned/untuned": mean,
        "cells": rows,
    }
    options.out.write_text(json.dumps(log, indent=1))
    print(f"tuned / untuned {mean:.3f} (geometric mean), {seconds:.0f} s, {log['kept_bytes']:,} bytes kept")


if __name__ == "__main__":
    main()
