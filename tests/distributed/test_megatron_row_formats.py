"""8-bit states, codes and stochastic rounding of Megatron's weights whose states data-parallel ranks have by rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron_harness import Case, Run, load, run, save

pytestmark = pytest.mark.timeout(300)

SHARDED = {"use_distributed_optimizer": True}
#: Rows of a block and a half, and of less than one; of the six behind a gate, ranks have three.
SHAPES = {
    "hidden_size": 96,
    "ffn_hidden_size": 3,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
WHOLE = Case(dtype=torch.bfloat16, clip=0.0, model=SHAPES, layers=1)
ROWS = replace(WHOLE, optimizer=SHARDED, ddp=SHARDED)
RECIPES = ("int8", "fp8", "sr-store", "fp8-weight")


def _owned(session: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Of each owned weight: its states as the optimizer has them on this rank."""
    forge = session.optimizer.chained_optimizers[0].forge
    return {
        name: {key: value.clone() for key, value in forge.state[p].items() if value.dim()}
        for p, name in forge.names.items()
    }


def _read(case: Case, folder: str, *, steps: int) -> tuple[dict, dict]:
    session = Run(case)
    load(session, folder)
    held = _owned(session)
    return held, session.train(steps)["weights"] if steps else {}


def _write(folder: str) -> dict:
    found = {}
    for recipe in RECIPES:
        whole, rows = Run(WHOLE.with_forge(recipe=recipe)), Run(ROWS.with_forge(recipe=recipe))
        for session in (whole, rows):
            session.train(2)
        place = f"{folder}/{recipe}"
        save(rows, place)
        found[recipe] = {
            "whole": (_owned(whole), whole.weights()),
            "rows": (_owned(rows), rows.weights()),
            "straight": rows.train(1)["weights"],
            "resumed": _read(rows.case, place, steps=1),
            "read whole": _read(whole.case, place, steps=1),
            "coverage": str(rows.optimizer.chained_optimizers[0].forge.coverage),
        }
        dist.barrier()
    return found


def _read_alone(folder: str) -> dict:
    return {recipe: _read(ROWS.with_forge(recipe=recipe), f"{folder}/{recipe}", steps=0)[0] for recipe in RECIPES}


def _expect_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            _expect_same(value, other[name])
        else:
            # e4m3 has no equality.
            assert value.dtype is other[name].dtype, name
            assert torch.equal(value.float(), other[name].float()), name


def test_rows_have_the_codes_scales_and_bits_of_the_whole(tmp_path):
    """Beside a run that shards nothing; resumed bit for bit, by one that shards nothing, and by half the ranks."""
    for recipe in RECIPES:
        (tmp_path / recipe).mkdir()
    ranks = run(2, _write, str(tmp_path), tp=1)
    (alone,) = run(1, _read_alone, str(tmp_path), tp=1)
    for recipe in RECIPES:
        whole, weights = ranks[0][recipe]["whole"]
        joined = {
            name: {key: torch.cat([rank[recipe]["rows"][0][name][key].cpu() for rank in ranks]) for key in state}
            for name, state in whole.items()
        }
        _expect_same(joined, whole)
        _expect_same(alone[recipe], whole)
        assert any(key.endswith("_scale") for state in whole.values() for key in state) is (recipe in ("int8", "fp8"))
        for rank in ranks:
            found = rank[recipe]
            _expect_same(found["rows"][1], weights)
            assert ("weight as e4m3 codes" in found["coverage"]) is (recipe == "fp8-weight")
            for reader, written in (("resumed", found["rows"][0]), ("read whole", whole)):
                held, then = found[reader]
                _expect_same(held, written)
                _expect_same(then, found["straight"])
            for name, state in found["rows"][0].items():
                (line,) = (line for line in found["coverage"].splitlines() if line.startswith(name))
                assert f"{sum(value.nbytes for value in state.values()):,}" in line.split()
