"""T1: replicas are bit-equal after every step, with replicated and with sharded states.

Catches a rank that steps another sum than the others, weights that were not gathered, and a norm that differs.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading


def measure(case: Case) -> list[Reading]:
    from gates.data_parallel import HOWS, attached, drift
    from gates.sharded import steps

    readings = []
    for name, how in HOWS.items():
        model, optimizer = attached(case, how)
        apart = [drift([*model.parameters(), optimizer.grad_norm]) for _ in steps(case, how.arm, model, optimizer)]
        readings.append(Reading(f"drift between ranks, {name}", max(apart, key=lambda gap: (gap != gap, gap)), 0.0))
    return readings


GATE = Gate(
    id="T1",
    compares="each rank's weights and gradient norm after every step, against the other ranks', bit for bit",
    axis="dp",
    least=2,
    shardings=("none", "states"),
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
