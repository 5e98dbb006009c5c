"""A rank that measures one gate with one thing after the other broken; started by torchrun from test_gates_red.py.

Each break replaces something inside this process, on every rank alike unless it says otherwise, and is undone after.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from forge_megatron import ForgeOptimizer, rules
from forge_megatron.linear import Use
from gates.gate import Case, get
from gates.worker import measure, ranks

DONE = SimpleNamespace(wait=lambda: None)


def function():
    from forge_megatron.megatron import function

    return function


def collectives(**replaced):
    """The linears' torch.distributed with some of its functions replaced; the gates' and Megatron's stay."""
    module = function()
    return patch.object(module, "dist", SimpleNamespace(**{**vars(module.dist), **replaced}))


def no_all_reduce():
    return collectives(all_reduce=lambda tensor, **_: DONE)


def no_reduce_scatter():
    def own_part(out, whole, group, async_op):
        out.copy_(whole.chunk(group.size())[group.rank()])
        return DONE

    return collectives(reduce_scatter_tensor=own_part)


def no_gather():
    def repeat(shard, group, *, shared, async_op=False):
        return torch.cat([shard] * group.size()), DONE

    return patch.object(function(), "_gather_sequence", repeat)


def kept_input_overwritten():
    """A waiting weight's X left in the buffer that the next layer gathers into."""
    gather = function()._gather_sequence

    def shared_always(shard, group, *, shared, async_op=False):
        return gather(shard, group, shared=True, async_op=async_op)

    return patch.object(function(), "_gather_sequence", shared_always)


def stale_weight():
    first: dict[int, torch.Tensor] = {}
    kept = property(lambda use: first.setdefault(id(use.owned), use.owned.weight.detach().clone()))
    return patch.object(Use, "weight", kept)


def input_gradient_from_the_updated_weight():
    begin = Use.begin

    def early(use):
        use.owned.weight.data.mul_(1.001)
        return begin(use)

    return patch.object(Use, "begin", early)


def a_rank_parts():
    step = ForgeOptimizer.step

    def parting(self, *args, **kwargs):
        step(self, *args, **kwargs)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                self.param_groups[0]["params"][-1].mul_(1 + 2e-7)

    return patch.object(ForgeOptimizer, "step", parting)


def twice_the_gradient():
    deliver = Use.deliver
    return patch.object(Use, "deliver", lambda use, dy, x, **kwargs: deliver(use, 2 * dy, x, **kwargs))


def not_a_number():
    deliver = Use.deliver
    return patch.object(Use, "deliver", lambda use, dy, x, **kwargs: deliver(use, dy, x * torch.nan, **kwargs))


@contextlib.contextmanager
def scalars(replacement) -> Iterator[None]:
    rule = rules.get("adamw")
    original = rule.scalars
    object.__setattr__(rule, "scalars", lambda group, step: replacement(original, group, step))
    yield
    object.__setattr__(rule, "scalars", original)


def no_decay():
    return scalars(lambda original, group, step: original({**group, "weight_decay": 0.0}, step))


def learning_rate_a_step_late():
    seen: dict[tuple[int, int], float] = {}

    def late(original, group, step):
        seen[id(group), step] = group["lr"]
        return original({**group, "lr": seen.get((id(group), step - 1), group["lr"])}, step)

    return scalars(late)


def no_clipping():
    from forge_megatron.megatron import ForgeMegatronOptimizer

    return patch.object(ForgeMegatronOptimizer, "set_total_norm", lambda self, norm: None)


BREAKS = {
    "TP": {
        no_all_reduce: "ΔW, in backward",
        stale_weight: "ΔW, in backward",
        input_gradient_from_the_updated_weight: "ΔW, in backward",
        a_rank_parts: "drift between ranks, waiting",
        no_decay: "ΔW, waiting",
        twice_the_gradient: "Δstate, in backward",
        not_a_number: "ΔW, in backward",
    },
    "SP1": {
        no_gather: "SP-dense ΔW, in backward",
        no_reduce_scatter: "SP-dense ΔW, waiting",
        kept_input_overwritten: "SP-dense ΔW, waiting",
    },
    "MG": {
        no_reduce_scatter: "loss gap, in backward",
        no_decay: "loss gap, in backward",
        learning_rate_a_step_late: "loss gap, in backward",
        twice_the_gradient: "norm gap, in backward",
        no_clipping: "Δstate, waiting",
    },
}


def main(gate_id: str, folder: Path) -> None:
    """Readings by break, "" for none at first and "again" for none at last, as JSON from rank 0."""
    case = Case(gate_id, "cpu", "fp32", 2, True in get(gate_id).sp)
    answers = {}
    with ranks("cpu", 2):
        answers[""] = measure(case)
        for broken in BREAKS[gate_id]:
            with broken():
                answers[broken.__name__] = measure(case)
        answers["again"] = measure(case)
    if os.environ["RANK"] == "0":
        plain = {name: [asdict(reading) for reading in readings] for name, readings in answers.items()}
        (folder / "answers.json").write_text(json.dumps(plain))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
