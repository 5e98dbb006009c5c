"""F3: fully sharded 16-bit weights with fp32 masters against one process with masters by hand.

Catches a step of the rounded weight instead of its master, a weight that is not its master rounded, and states in 16
bits.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

# The paper's. A gradient that rounds to the other side in 16 bits, after sums in another order, moves a state by 2^-9
# of that coordinate.
LOSS, STATES = 2e-6, 2.0**-10


def measure(case: Case) -> list[Reading]:
    from gates.sharded import MASTERS, Arm, alone, gaps, parallel

    readings = []
    for how, arm in {"on arrival": Arm(precision=MASTERS), "clipped": Arm(precision=MASTERS, clip=0.5)}.items():
        ours, reference = parallel(case, arm), alone(case, arm)
        readings += gaps(how, ours, reference, losses=LOSS, states=STATES)
    return readings


GATE = Gate(
    id="F3",
    compares="fully sharded 16-bit weights with fp32 masters against one process with masters by hand",
    axis="dp",
    least=2,
    shardings=("full",),
    sp=(False,),
    dtypes=("bf16",),
    measure=measure,
)
