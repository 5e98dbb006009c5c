"""Ranks that tune together: each kind of launch on one of them, one table on all. Interpreted, with times made up."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import forge_megatron as forge
from forge_megatron.kernels import candidates, tuned, tuning
from launch import metrics
from tests.distributed.ranks import run
from tests.distributed.trainer_runs import NO_INDEX_BUILDER, Job, write_data

TOKENS = 16


def attached():
    """A linear that both ranks have, and one of each rank's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 32, bias=False), nn.Linear(32, 16 + 16 * dist.get_rank(), bias=False))
    return forge.attach(net.bfloat16(), lr=0.1, backend="triton")


def small_sets():
    tuning.COORDINATES = tuning.BEYOND_L2 = 1
    candidates.TILES["middle"] = candidates.TILES["middle"][4:5]


class Timer:
    """The first rank finds what is tried last the fastest, the second the untuned choice."""

    def __init__(self):
        self.known = {}

    def __call__(self, launches, device):
        return self.known.setdefault(launches[0], (0.5, 2.0)[dist.get_rank()] ** len(self.known))


def together(folder) -> tuple:
    small_sets()
    optimizer = attached()
    found = forge.tune(optimizer, [TOKENS], folder=folder, timer=Timer())
    table = {str(cell): str(candidate) for cell, candidate in tuned._table.items()}
    tuned.clear()
    again = forge.tune(optimizer, [TOKENS], folder=folder, timer=None)
    assert again.outcomes == found.outcomes
    assert not again.measured
    return table, sorted(map(str, found.measured))


def test_ranks_share_the_work_and_have_one_table(tmp_path):
    (first, measured), (second, also) = run(2, together, str(tmp_path))
    assert first == second
    assert measured == also == sorted(first)
    assert len(list(tmp_path.iterdir())) == len(first) == 3
    shapes = {name.split("]")[0].split("[")[1]: kernel for name, kernel in first.items()}
    assert shapes["16, 32"] == "triton 128x64x64 g8 p4 w4 s4"
    assert shapes["32, 32"] == "triton 64x64x64 g8 p2 w4 s4"


def one_fails(folder) -> str:
    small_sets()

    def timer(launches, device):
        if dist.get_rank() == 1:
            raise OSError("the clock stopped")
        return 1.0

    with pytest.raises(RuntimeError, match=r"tune\(\) failed on rank 1: adamw .*16 tokens: OSError: the clock stopped"):
        forge.tune(attached(), [TOKENS], folder=folder, timer=timer)
    return str(dict(tuned._table))


def test_a_rank_that_fails_fails_all_and_leaves_no_table(tmp_path):
    assert run(2, one_fails, str(tmp_path)) == ["{}", "{}"]


@NO_INDEX_BUILDER
def test_a_run_of_the_trainer_says_what_was_tuned(tmp_path):
    job = Job(
        tmp_path / "job",
        write_data(tmp_path),
        ("run.steps=1", "optimizer.warmup_steps=0", "checkpoint.save=false", "optimizer.tune=true"),
    )
    job.run()
    notes = [record["text"] for record in metrics.read(job.run_folder, "note")]
    assert "tuned 0 kinds of launch (0 measured now, 0 changed); 10 weights as untuned" in notes
