"""TP: column→row pairs, tensor-parallel with FORGE against dense with torch.

Catches an input gradient that was not reduced, an update from a stale or already updated weight, a wrong rule, and
ranks that part. Both ways of stepping are run: inside backward, and waiting for ``step()`` over two micro-batches.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

# Weights: one unit in the last place of fp32 after five steps, and in bf16 the paper's bound. States: they carry the
# gradient's own rounding, that of sums in another order. They are compared because Adam hides a constant factor on the
# gradient from the weights.
WEIGHTS = {"fp32": 2.0**-23, "bf16": 2.5e-3}
STATES = {"fp32": 2.0**-20, "bf16": 2.0**-6}


def measure(case: Case) -> list[Reading]:
    # megatron.core is for the ranks: the command line need not wait for its import.
    import torch

    from gates.pair import dense, drift, parallel, relative_rms, shards, states_of, weights_of, worst_relative_rms

    readings = []
    for micro_batches, how in ((1, "in backward"), (2, "waiting")):
        ours, reference = parallel(case, micro_batches), shards(case, dense(case, micro_batches))
        replicated = [p for name, p in ours.weights.items() if name.endswith("row.bias")]
        losses = torch.tensor(ours.losses, device=replicated[0].device)
        weights = relative_rms(weights_of(ours), weights_of(reference))
        states = worst_relative_rms(states_of(ours), states_of(reference))
        readings += [
            Reading(f"drift between ranks, {how}", drift([losses, *replicated]), 0.0),
            Reading(f"ΔW, {how}", weights, WEIGHTS[case.dtype]),
            Reading(f"Δstate, {how}", states, STATES[case.dtype]),
        ]
    return readings


GATE = Gate(
    id="TP",
    compares="column→row pairs, tensor-parallel with FORGE against dense torch.optim.AdamW, after 5 steps",
    least=2,
    sp=(False,),
    dtypes=("fp32", "bf16"),
    measure=measure,
)
