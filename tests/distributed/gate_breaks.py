"""A rank that measures one gate with one thing after the other broken; started from test_gates_red.py.

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
from weakref import WeakKeyDictionary

import torch

from forge_megatron import ForgeOptimizer, kernels, rules
from forge_megatron.coordinator.bucket import Piece
from forge_megatron.formats.state import StateFormat
from forge_megatron.formats.store import WeightStore
from forge_megatron.kernels import local
from forge_megatron.linear import OwnedWeight, Use
from gates.gate import Case, get
from gates.worker import measure, ranks
from tests.distributed import context_breaks, expert_breaks, pipeline_breaks

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


def stale_weight():
    first: WeakKeyDictionary[OwnedWeight, torch.Tensor] = WeakKeyDictionary()

    def kept(use):
        return first.setdefault(use.owned, use.owned.weight.detach().clone())

    # Inside an autograd function ``weight_as`` does not read ``weight``.
    return patch.multiple(Use, weight=property(kept), weight_as=lambda use, dtype: kept(use).to(dtype))


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
    return patch.object(Use, "deliver", lambda use, dy, x, **kwargs: deliver(use, dy, 2 * x, **kwargs))


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


def sharded():
    from forge_megatron.coordinator import fully_sharded

    return fully_sharded


def no_reduction():
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def own_part(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    return patch.object(DefaultReduceScatter, "__call__", own_part)


def a_group_is_left_out():
    launch = sharded().FullySharded._launch

    def leaving_out(self):
        if any("blocks.0" in self._labels[p] for p in self._collected):
            for p in self._collected:
                p.grad = None  # else step() would find it
            self._collected = []
        else:
            launch(self)

    return patch.object(sharded().FullySharded, "_launch", leaving_out)


def of_shards(change):
    """Every step of shards from changed gradients."""
    step = kernels.step

    def changed(slots, grads, **options):
        step(slots, [change(local(grad)) for grad in grads], **options)

    return patch.object(kernels, "step", changed)


def twice_the_shards_gradient():
    return of_shards(lambda grad: 2 * grad)


def not_a_number_in_a_shard():
    return of_shards(lambda grad: grad * torch.nan)


def norms_of_this_ranks_shards():
    from forge_megatron.coordinator import NormsOverRanks

    return patch.object(NormsOverRanks, "__call__", lambda self, norms_sq: norms_sq.clone())


def gathered_weights_outlive_the_step():
    return patch.object(sharded().FullySharded, "_reshard", lambda self: None)


def no_masters():
    return patch.object(WeightStore, "allocate", lambda self, weight: None)


def states_in_16_bits():
    def allocate(self, name, weight, value=0.0, *, nonnegative=False):
        return {name: torch.full_like(weight, value, dtype=torch.bfloat16)}

    return patch.object(StateFormat, "allocate", allocate)


def reduced_in_16_bits():
    from gates import sharded

    policy = sharded.MixedPrecisionPolicy
    return patch.object(sharded, "MixedPrecisionPolicy", lambda param_dtype, reduce_dtype: policy(param_dtype))


def the_16_bit_copy_is_stepped():
    launch = sharded().FullySharded._launch

    def rounding(self):
        collected = list(self._collected)
        for p in collected:
            local(p).copy_(local(p).bfloat16())
        launch(self)

    return patch.object(sharded().FullySharded, "_launch", torch.no_grad()(rounding))


def partial():
    from forge_megatron.coordinator import partial

    return partial.PartialSums


def no_sum_over_ranks():
    from forge_megatron.coordinator.ranks import Ranks

    return patch.multiple(Ranks, all_reduce=lambda *_: iter(()), reduce_scatter=lambda *_: iter(()))


def no_average():
    return patch.object(partial(), "mean", lambda self: None)


def a_factor_on_the_gradient():
    return patch.object(partial(), "mean", lambda self: torch.tensor(1.01 * self._scale))


def a_part_is_not_gathered():
    from forge_megatron.coordinator import sharded

    return patch.object(sharded.ShardedStates, "_gather_weights", lambda *_: iter(()))


def norms_of_this_ranks_part():
    close = partial()._close_norms
    return patch.object(partial(), "_close_norms", lambda self, *, partial: close(self, partial=False))


def a_row_is_left_out():
    rows = Piece.rows

    def short(self, parts, part):
        found = rows(self, parts, part)
        return slice(found.start, max(found.start, found.stop - 1))

    return patch.object(Piece, "rows", short)


def rounded_to_nearest():
    from forge_megatron.kernels import reference

    return patch.object(reference, "round_stochastically", lambda w, bits: w.bfloat16())


def bits_that_are_all_zero():
    from forge_megatron.kernels import reference

    rounded = reference.round_stochastically
    return patch.object(reference, "round_stochastically", lambda w, bits: rounded(w, bits * 0))


def bits_of_this_rank():
    from forge_megatron import random_bits

    words = random_bits.words
    rank = int(os.environ["RANK"])
    return patch.object(
        random_bits, "words", lambda origin, columns, seed, step: words(origin, columns, seed + rank, step)
    )


BREAKS = {
    "CP1": context_breaks.BREAKS,
    "PP1": pipeline_breaks.BREAKS,
    "SR": {
        rounded_to_nearest: "moved by a gradient, less what it asks for, stochastically",
        bits_that_are_all_zero: "moved by a decay, less what it asks for, stochastically",
        bits_of_this_rank: "drift between replicas, gradient",
    },
    "T0": {
        a_row_is_left_out: "max |ΔW| and |Δstate|, sharding=none, cut by rows",
        a_factor_on_the_gradient: "max |ΔW| and |Δstate|, sharding=states, whole",
    },
    "T1": {
        no_sum_over_ranks: "drift between ranks, replicated, on arrival",
        a_part_is_not_gathered: "drift between ranks, sharded states, waiting",
        norms_of_this_ranks_part: "drift between ranks, replicated, waiting",
    },
    "T2": {
        no_sum_over_ranks: "loss gap, replicated, on arrival",
        no_average: "Δstate, sharded states, on arrival",
        norms_of_this_ranks_part: "Δstate, sharded states, waiting",
        a_row_is_left_out: "ΔW, replicated, waiting",
    },
    "F1": {
        no_reduction: "loss gap, on arrival",
        a_group_is_left_out: "ΔW, on arrival",
        twice_the_shards_gradient: "Δstate, on arrival",
        not_a_number_in_a_shard: "loss gap, waiting",
        norms_of_this_ranks_shards: "Δstate, waiting",
        no_decay: "ΔW, replicated shards",
    },
    "F2": {
        gathered_weights_outlive_the_step: "gathered weights less the shards, waiting",
        a_rank_parts: "drift of gathered weights between ranks, replicated shards",
    },
    "F3": {
        no_masters: "loss gap, on arrival",
        states_in_16_bits: "Δstate, on arrival",
        no_reduction: "loss gap, clipped",
    },
    "MW": {
        reduced_in_16_bits: "Δstate, on arrival",
        the_16_bit_copy_is_stepped: "loss gap, on arrival",
    },
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
    },
    "MG": {
        no_reduce_scatter: "loss gap, in backward",
        no_decay: "loss gap, in backward",
        learning_rate_a_step_late: "loss gap, in backward",
        twice_the_gradient: "norm gap, in backward",
        no_clipping: "Δstate, waiting",
    },
    "EP1": {
        expert_breaks.experts_of_one_ranks_mean: "norm gap, in backward",
        expert_breaks.experts_without_tokens_are_left_out: "starved expert: weight less its decay, in backward",
        expert_breaks.norms_of_this_ranks_experts: "norm gap, waiting",
        no_sum_over_ranks: "loss gap, in backward",
        no_decay: "starved expert: weight less its decay, waiting",
        twice_the_gradient: "Δstate, in backward",
        expert_breaks.tokens_of_the_expert_before: "Δstate, in one tensor",
    },
}


def readings_of(case: Case) -> dict[str, list[dict]]:
    """Readings by break, "" for none at first and "again" for none at last."""
    answers = {"": measure(case)}
    for broken in BREAKS[case.gate]:
        with broken():
            answers[broken.__name__] = measure(case)
    answers["again"] = measure(case)
    return {name: [asdict(reading) for reading in readings] for name, readings in answers.items()}


def main(folder: Path, gate_ids: list[str]) -> None:
    """The readings of each gate, as JSON from rank 0."""
    gates = [get(gate_id) for gate_id in gate_ids]
    cases = [gate.case("cpu", gate.dtypes[0], 2, True in gate.sp) for gate in gates]
    with ranks("cpu", cases[0].degrees):
        answers = {case.gate: readings_of(case) for case in cases}
    if os.environ["RANK"] == "0":
        (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
