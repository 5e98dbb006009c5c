"""T2: FORGE over data-parallel ranks against one process with torch and the whole batch.

Catches a gradient that was not summed, summed twice or not averaged, rows that were not stepped, and a norm that counts
a part twice or not at all.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

# The paper's; and some units in the last place of fp32 after five steps. States carry the rounding of sums in another
# order, and are compared because Adam hides a constant factor on the gradient from the weights.
LOSS, WEIGHTS, STATES = 6e-7, 2.0**-23, 2.0**-19


def measure(case: Case) -> list[Reading]:
    from gates.data_parallel import HOWS, parallel
    from gates.sharded import alone, gaps

    readings = []
    for name, how in HOWS.items():
        ours, reference = parallel(case, how), alone(case, how.arm)
        readings += gaps(name, ours, reference, losses=LOSS, weights=WEIGHTS, states=STATES)
    return readings


GATE = Gate(
    id="T2",
    compares="data-parallel ranks with FORGE against one process with torch.optim: losses, weights, states",
    axis="dp",
    least=2,
    shardings=("none", "states"),
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
