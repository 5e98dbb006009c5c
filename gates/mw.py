"""MW: fp32 weights that FSDP2 gathers in 16 bits, stepped by FORGE, against torch's mixed precision in one process.

Catches a step of the 16-bit copy instead of the fp32 weight, and gradients that are reduced or summed in 16 bits.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

LOSS, WEIGHTS, STATES = 6e-7, 2.0**-23, 2.0**-19
# While it trains, a weight within fp32 rounding of the middle of two bf16 numbers may be gathered as the other one,
# as in F3, whose bound this is. The fp32 weights' own loss knows no such step.
TRAINING_LOSS = 2e-6


def measure(case: Case) -> list[Reading]:
    from gates.sharded import MIXED, Arm, alone, gaps, loss_of_weights, parallel

    readings = []
    arms = {"on arrival": Arm(precision=MIXED), "waiting": Arm(precision=MIXED, micro_batches=2, clip=0.5)}
    for how, arm in arms.items():
        ours, reference = parallel(case, arm), alone(case, arm)
        gap = abs(loss_of_weights(case, ours) - loss_of_weights(case, reference))
        readings.append(Reading(f"gap of the fp32 weights' losses, {how}", gap, LOSS))
        readings += gaps(how, ours, reference, losses=TRAINING_LOSS, weights=WEIGHTS, states=STATES)
    return readings


GATE = Gate(
    id="MW",
    compares="fp32 weights that FSDP2 gathers in 16 bits, with FORGE, against torch's mixed precision in one process",
    axis="dp",
    least=2,
    shardings=("full",),
    sp=(False,),
    dtypes=("bf16",),
    measure=measure,
)
