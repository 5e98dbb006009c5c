"""One rank of some cases; started by torchrun with the cases and the folder for their answers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gates.gate import Case, Degrees, Reading, get
from launch import cpu

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@contextlib.contextmanager
def ranks(device: str, degrees: Degrees) -> Iterator[None]:
    """Process group and Megatron's parallel state for cases of the same degrees, from torchrun's variables."""
    cpu.enable(device)
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*not installed")
    from megatron.core import parallel_state

    from gates.layout import initialize

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    initialize(degrees)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def measure(case: Case) -> list[Reading]:
    """The gate's readings, the same on every rank: the largest value over the ranks."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    return _over_ranks(get(case.gate).measure(case))


def main(cases: list[Case], folder: Path) -> None:
    """Measure each case, and let rank 0 write it down."""
    with ranks(cases[0].device, cases[0].degrees):
        for i, case in enumerate(cases):
            start = time.monotonic()
            readings = measure(case)
            if dist.get_rank() == 0:
                answer = {"readings": [asdict(r) for r in readings], "seconds": time.monotonic() - start}
                (folder / f"{i}.json").write_text(json.dumps(answer), encoding="utf-8")
            dist.barrier()


def _over_ranks(readings: list[Reading]) -> list[Reading]:
    """Every rank's readings as one list: the largest value counts, and a NaN anywhere stays NaN."""
    gathered: list[list[Reading] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, readings)
    merged = []
    for same in zip(*gathered, strict=True):
        assert len({(reading.what, reading.bound) for reading in same}) == 1, same
        values = [reading.value for reading in same]
        merged.append(replace(same[0], value=max(values, key=lambda value: (value != value, value))))
    return merged


if __name__ == "__main__":
    answers = Path(sys.argv[2])
    try:
        main([Case.from_dict(case) for case in json.loads(sys.argv[1])], answers)
    except BaseException:
        (answers / f"{os.environ['RANK']}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
