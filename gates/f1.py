"""F1: a fully sharded model with FORGE against one process with torch.

Catches a gradient that was not reduced or counted twice, a shard that was not stepped or stepped from a part of its
gradient, padding that reached a weight, and a norm that counts a shard twice or not at all.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

# The paper's; and some units in the last place of fp32 after five steps. States carry the rounding of sums in another
# order, and are compared because Adam hides a constant factor on the gradient from the weights.
LOSS, WEIGHTS, STATES = 5e-7, 2.0**-23, 2.0**-19


def measure(case: Case) -> list[Reading]:
    # torch.distributed.fsdp is for the ranks: the command line need not wait for its import.
    from gates.sharded import Arm, alone, gaps, parallel

    readings = []
    arms = {"on arrival": Arm(), "waiting": Arm(micro_batches=2, clip=0.5)}
    if case.degrees.dp % 2 == 0:
        arms["replicated shards"] = Arm(replicas=2)
    for how, arm in arms.items():
        ours, reference = parallel(case, arm), alone(case, arm)
        readings += gaps(how, ours, reference, losses=LOSS, weights=WEIGHTS, states=STATES)
    return readings


GATE = Gate(
    id="F1",
    compares="a fully sharded model with FORGE against one process with torch.optim: losses, weights, states",
    axis="dp",
    least=2,
    shardings=("full",),
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
