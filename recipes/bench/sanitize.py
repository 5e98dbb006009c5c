"""One launch of each kind of the Hopper kernel, for ``recipes/bench/sanitize.sh``. Arguments: kinds; default: all."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import test_hopper_formats_gpu as cases  # noqa: E402
from exact_steps import STORAGE, make  # noqa: E402
from test_hopper_grouped_gpu import routed  # noqa: E402

from forge_megatron.kernels import hopper_wgrad, wgrad, wgrad_accumulate, wgrad_norm_sq, wgrad_step  # noqa: E402
from forge_megatron.kernels.hopper_config import CONFIGS  # noqa: E402

SHAPES = [(8, 16), (200, 336)]

#: Tokens of each expert.
COUNTS = (0, 1, 70, 0, 33)


def _step(storage: str, accumulated: bool = False):
    def launch(shape, segments) -> None:
        accumulator = torch.zeros(shape, device="cuda") if accumulated else None
        multiplier = torch.ones((), device="cuda")
        slot = make(shape, storage)
        wgrad_step(slot, segments, accumulator=accumulator, multiplier=multiplier, backend="hopper")

    return launch


def _into(operation):
    return lambda shape, segments: operation(segments, torch.zeros(shape, device="cuda"), backend="hopper")


def _of_experts(operation):
    return lambda shape, segments: operation((len(COUNTS), *shape), [routed(shape, COUNTS)])


KINDS = {
    **{storage: _step(storage) for storage in STORAGE},
    "step of an accumulator": _step("bf16", accumulated=True),
    "step of experts": _of_experts(_step("bf16")),
    "step of experts' accumulator": _of_experts(_step("sr-store", accumulated=True)),
    "write experts": _of_experts(_into(wgrad)),
    "write": _into(wgrad),
    "accumulate": _into(wgrad_accumulate),
    "norm": lambda shape, segments: wgrad_norm_sq(segments, torch.zeros((), device="cuda"), backend="hopper"),
}


def main() -> None:
    kinds = sys.argv[1:] or KINDS
    for config in CONFIGS:
        hopper_wgrad.choose_config = lambda *sizes, config=config: config
        for shape in SHAPES:
            for kind in kinds:
                KINDS[kind](shape, cases.factors(shape))
    torch.cuda.synchronize()
    print(f"{len(CONFIGS) * len(SHAPES) * len(kinds)} launches")


if __name__ == "__main__":
    main()
