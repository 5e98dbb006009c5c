"""SR: bf16 weights that are rounded stochastically follow updates far below a rounding step, alike on every replica.

Catches a rounding that is biased, a decay that is rounded away, and random bits that depend on the rank.
"""

from __future__ import annotations

from gates.gate import Case, Gate, Reading

STEPS = 150
#: A hundredth of what separates bf16 numbers above 1: rounded to nearest, nothing ever moves.
UPDATE = 2.0**-7 / 100
#: Coordinates of the weight: the mean of so many walks is known to a fifth of the bound.
SHAPE = (128, 128)
BOUND = 0.03


def measure(case: Case) -> list[Reading]:
    import torch
    from torch import nn

    from gates.data_parallel import drift

    def walked(weight_store: str, what: str) -> tuple[float, float]:
        """How far the mean weight has gone of where it should be, less 1; and the drift between the replicas."""
        linear = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=torch.bfloat16, device=case.device)
        nn.init.ones_(linear.weight)
        optimizer = attach(linear, weight_store, what)
        x = torch.full((1, SHAPE[1]), 1.0 if what == "gradient" else 0.0, dtype=torch.bfloat16, device=case.device)
        for _ in range(STEPS):
            linear(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gone = 1.0 - linear.weight.detach().double().mean().item()
        should = STEPS * UPDATE if what == "gradient" else 1.0 - (1.0 - UPDATE) ** STEPS
        return gone / should, drift([linear.weight])

    readings = []
    for what in ("gradient", "decay"):
        nearest, _ = walked("nearest", what)
        stochastic, apart = walked("stochastic", what)
        readings += [
            Reading(f"moved by a {what}, to nearest", abs(nearest), 0.0),
            Reading(f"moved by a {what}, less what it asks for, stochastically", abs(stochastic - 1.0), BOUND),
            Reading(f"drift between replicas, {what}", apart, 0.0),
        ]
    return readings


def attach(linear, weight_store: str, what: str):
    """An optimizer whose every step asks for ``UPDATE`` of a weight of 1, by its gradient or by its decay."""
    import torch.distributed as dist

    import forge_megatron as forge

    how = {"weight_store": weight_store, "state_format": "bf16", "process_group": dist.group.WORLD}
    if what == "gradient":
        return forge.attach(linear, "sgd", lr=UPDATE, **how)
    return forge.attach(linear, "adamw", lr=0.1, weight_decay=UPDATE / 0.1, **how)


GATE = Gate(
    id="SR",
    compares="bf16 weights after 150 updates of a hundredth of a rounding step, against the sum of the updates",
    axis="dp",
    least=2,
    shardings=("none",),
    sp=(False,),
    dtypes=("bf16",),
    measure=measure,
)
