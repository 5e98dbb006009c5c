"""CP1: a GPT whose sequences lie over context-parallel ranks, with FORGE, against one process with torch.

The launcher's own model, optimizers, split of the sequence and step, with the attention that needs no Transformer
Engine. The reference is PP1's, on whole sequences. Catches a weight gradient that is not summed over context ranks,
keys or positions in another order than the sequence's, gradients of keys and values that stay on one rank, and a mean
over fewer tokens than all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gates.gate import Case, Degrees, Gate, Reading
from gates.pp1 import STEPS, Arm, alone, batches, compared, recipe, train

if TYPE_CHECKING:
    from gates.pair import Run

KINDS = ("all_gather", "a2a", "p2p")
ARMS = {"in backward": Arm(rounds=0), "tied, clipped": Arm(tied=True, clip=0.1)}


def context(case: Case, arm: Arm, kind: str, initial: dict) -> Run:
    """FORGE on this rank's parts of the sequences, from the weights that one process has."""
    from gates.mg import states
    from gates.pair import Run, device_of
    from launch import config
    from launch.data import on_this_context_rank
    from launch.model import build_chunks

    over = config.Parallel(context=case.degrees.cp, context_comm=kind)
    split = replace(recipe(case, arm, 1), parallel=over)
    (model,) = build_chunks(split, split.model.vocab_size, device_of(case))
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.data.copy_(initial[name])
    losses, optimizer = train(split, [model], map(on_this_context_rank, batches(case, arm, 5, STEPS)))
    return Run({name: p.detach() for name, p in named.items()}, states(model, optimizer), losses)


def measure(case: Case) -> list[Reading]:
    from gates.layout import instead_of

    with instead_of(case.degrees, Degrees(dp=case.degrees.cp)):
        references = {how: alone(case, arm) for how, arm in ARMS.items()}
    readings = []
    for how, (initial, reference) in references.items():
        for kind in KINDS:
            readings += compared(f"{kind}, {how}", context(case, ARMS[how], kind, initial), reference)
    return readings


GATE = Gate(
    id="CP1",
    compares="a Megatron GPT over context ranks with FORGE against one process with torch: losses, weights, states",
    axis="cp",
    least=2,
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
