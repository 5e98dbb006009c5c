"""What every test shares: the interpreter for Triton where there is no GPU, and markers by folder."""

import gc
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()

# Triton reads it once, when it is imported; the kernels' tests then run them interpreted.
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
# For the processes that tests start: they share the machine's cores with each other and with this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They run from other folders, and import launch and gates, which are not installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))

# What is run on both supported versions of megatron-core.
MEGATRON = ("test_megatron", "test_launch", "test_trainer", "test_gates_green")
# Of these, the files that never import it, and those of a shell script and of arithmetic on what a run wrote down: the
# preflight that the script comes to, and the runs, have tests of their own, on both versions.
WITHOUT = (
    *("test_launch_bench", "test_launch_bench_liger", "test_launch_bench_ranks", "test_launch_cluster"),
    *("test_launch_slurm", "test_launch_demo"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder and name, the longest first; a GPU's tests are deselected where there is no GPU."""
    left_out = []
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in ("gpu", "distributed"):
            item.add_marker(folder)
        if item.path.stem.startswith(MEGATRON) and item.path.stem not in WITHOUT:
            item.add_marker("megatron")
        if "gpu" in item.keywords and not GPU:
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: "distributed" not in item.keywords)


def pytest_collection_finish() -> None:
    # What is imported stays: a collection, of which tests ask for many, looks at what they have made since.
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # What is imported, which with a megatron-core put in front is not what is installed.
    from launch.provenance import versions

    there = ", ".join(f"{name} {version}" for name, version in versions().items())
    terminalreporter.section("machine")
    terminalreporter.line(f"{there}; {torch.cuda.device_count()} GPUs")
    if not GPU:
        terminalreporter.line("NOT RUN: tests marked gpu (tests/gpu), because this machine has no CUDA device")
