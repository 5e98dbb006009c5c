"""Parallelisms composed on eight ranks with FORGE: Megatron's own optimizer in the same layout, and one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from megatron_harness import Case, Run, gap, layout, run, train_both
from megatron_pairs import LOSS

pytestmark = pytest.mark.timeout(600)

BASE = Case(steps=3, micro_batches=2, clip=0.05, tied=True, own_batches=True)
RING = {"cp_comm_type": "p2p"}
FREED = {"deallocate_pipeline_outputs": True}
#: Degrees (the rest of eight ranks is data parallel), the case, and ranks that have the same weights.
LAYOUTS = {
    "TP 2, CP 2, DP 2": ({"tp": 2, "cp": 2}, replace(BASE, sequence_parallel=True, model=RING), [(0, 2), (1, 7)]),
    "TP 2, PP 2, DP 2": ({"tp": 2, "pp": 2}, replace(BASE, sequence_parallel=True, model=FREED), [(0, 2), (5, 7)]),
    "CP 2, PP 2, DP 2": ({"tp": 1, "cp": 2, "pp": 2}, replace(BASE, model=RING | FREED), [(0, 3), (4, 7)]),
    "PP 2, DP 4": ({"tp": 1, "pp": 2}, replace(BASE, model=FREED), [(0, 3), (4, 7)]),
}


class Alone(Run):
    """One process that takes the batches of all data-parallel ranks in turn."""

    def __init__(self, case: Case, replicas: int) -> None:
        own = {key: value for key, value in case.model.items() if key not in RING}
        super().__init__(replace(case, micro_batches=replicas * case.micro_batches, sequence_parallel=False, model=own))
        self._generators = cycle([torch.Generator().manual_seed(99 + rank) for rank in range(replicas)])

    def batch(self) -> dict[str, torch.Tensor]:
        self.generator = next(self._generators)
        return super().batch()


def _alone() -> dict[int, dict]:
    return {replicas: Alone(BASE, replicas).train() for replicas in (2, 4)}


def _in_layouts() -> dict:
    found = {}
    for name, (degrees, case, _) in LAYOUTS.items():
        with layout(**degrees):
            found[name] = train_both(case)
    return found


def test_eight_ranks_train_like_megatron_and_like_one_process():
    ranks, (alone,) = run(8, _in_layouts), run(1, _alone)
    for name, (degrees, _, replicas) in LAYOUTS.items():
        whole = alone[4 if name.endswith("DP 4") else 2]
        for rank in ranks:
            theirs, ours = rank[name]
            assert gap(theirs["losses"], ours["losses"]) <= LOSS, name
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5), name
            # Each weight is counted once: a tied one on two stages, and one that tensor-parallel ranks all have.
            assert ours["norms"] == pytest.approx(whole["norms"], rel=1e-5), name
            for weight, value in ours["weights"].items():
                torch.testing.assert_close(value, theirs["weights"][weight], rtol=0, atol=5e-5)
                if degrees["tp"] == 1 and weight != "output_layer.weight":
                    torch.testing.assert_close(value, whole["weights"][weight], rtol=0, atol=5e-5)
        for one, other in replicas:
            here, there = (ranks[rank][name][1]["weights"] for rank in (one, other))
            assert here.keys() == there.keys()
            for weight, value in here.items():
                assert torch.equal(value, there[weight]), (name, weight)
