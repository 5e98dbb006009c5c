"""SP1: column→row pairs under sequence parallelism against tensor parallelism against dense.

Under sequence parallelism a rank's own tokens give a partial weight gradient: it is complete only if the column linear
gathered X and the row linear gathered dY before the update. Catches either one missing, and a gathered X that the next
layer has overwritten where the factors wait for ``step()``.
"""

from __future__ import annotations

from dataclasses import replace

from gates.gate import Case, Gate, Reading
from gates.tp import STATES, WEIGHTS


def measure(case: Case) -> list[Reading]:
    from gates.pair import dense, parallel, relative_rms, shards, states_of, weights_of, worst_relative_rms

    readings = []
    for micro_batches, how in ((1, "in backward"), (2, "waiting")):
        sequence = parallel(case, micro_batches)
        tensor = parallel(replace(case, sp=False), micro_batches)
        whole = shards(case, dense(case, micro_batches))
        for name, a, b in (("SP-TP", sequence, tensor), ("SP-dense", sequence, whole), ("TP-dense", tensor, whole)):
            weights = relative_rms(weights_of(a), weights_of(b))
            states = worst_relative_rms(states_of(a), states_of(b))
            readings.append(Reading(f"{name} ΔW, {how}", weights, WEIGHTS["fp32"]))
            readings.append(Reading(f"{name} Δstate, {how}", states, STATES["fp32"]))
    return readings


GATE = Gate(
    id="SP1",
    compares="column→row pairs, sequence-parallel against tensor-parallel against dense, after 5 steps",
    least=2,
    sp=(True,),
    dtypes=("fp32",),
    measure=measure,
)
