"""One kind of launch, tuned on copies: which candidate is the fastest of those that change no bit.

A candidate is timed only if it leaves the bits of weight, master, states and scales that the untuned choice leaves.
That is compared over at least ``COORDINATES`` of them: a gradient that is summed in another order moves about one bf16
store in 2^15, so that it is found out. A gradient's norm is summed by tiles and may differ in its last fp32 digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import fused
from .candidates import candidates
from .entrance import entrance
from .slot import Segment, Slot, check_slot, of_codes
from .timing import device_us
from .tuned import Candidate, Cell

#: Coordinates whose bits are compared, of as many draws of the factors as that takes.
COORDINATES = 1 << 22

#: Bytes of weights and states that launches walk over before they come back to the first: far more than any L2.
BEYOND_L2 = 300 << 20
MOST_COPIES = 12

#: A candidate replaces the untuned choice if it takes less than this part of its time: below is noise.
FASTER = 0.98

#: The step that scalars are made for, and a rate at which the update, not the old weight, decides the new one's bits.
STEP, RATE = 10, 1.0

SEED = 20

#: What times a round of launches on a device, in µs of one.
Timer = Callable[[Sequence[Callable[[], None]], torch.device], float]


@dataclass(frozen=True)
class Outcome:
    """What tuning one cell has found.

    Attributes:
        default: what is taken untuned.
        chosen: what is taken from now on; may be the same.
        us: µs of a step, by candidate; empty where nothing was timed.
        left_out: why others were not timed.
    """

    default: Candidate
    chosen: Candidate
    us: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def tried(slot: Slot, cell: Cell) -> list[Candidate]:
    """The candidates of ``cell``, the untuned choice first.

    Raises:
        ValueError: its backend cannot step ``slot``.
    """
    slot = of_codes(slot)
    check_slot(slot)
    factors = _empty_factors(slot, cell)
    return candidates(slot, [factors], cell.backend)


@entrance
def tune_cell(
    slot: Slot, cell: Cell, hyperparameters: Mapping, *, multiplied: bool = False, timer: Timer = device_us
) -> Outcome:
    """Times the candidates of ``cell`` on copies of ``slot``, with random factors of their own generator.

    Neither ``slot`` nor the state of any random generator is changed, and no memory is kept.

    Args:
        slot: any of the weights that ``cell`` describes.
        hyperparameters: of its group.
        multiplied: its steps have a multiplier.

    Raises:
        torch.OutOfMemoryError: there is no room for the copies.
    """
    on_cuda = slot.weight.device.type == "cuda"
    with torch.cuda.device(slot.weight.device) if on_cuda else nullcontext():
        return _tune(of_codes(slot), cell, hyperparameters, multiplied, timer)


def _tune(slot: Slot, cell: Cell, hyperparameters: Mapping, multiplied: bool, timer: Timer) -> Outcome:
    found = tried(slot, cell)
    random = torch.Generator(slot.weight.device).manual_seed(SEED)
    multiplier = torch.ones((), device=slot.weight.device) if multiplied else None
    left_out: dict[str, str] = {}
    scalars = slot.rule.scalars({**hyperparameters, "lr": RATE}, STEP, *slot.rule.running.values())
    own = replace(_copy(slot), scalars=slot.scalars.new_tensor(scalars))
    check_slot(own)
    alive = _bit_equal(own, cell, found, random, multiplier, left_out)
    if len(alive) == 1:
        return Outcome(found[0], found[0], {}, left_out)
    nbytes = sum(tensor.nbytes for tensor in _written(own))
    count = max(1, min(MOST_COPIES, math.ceil(BEYOND_L2 / max(nbytes, 1))))
    members = [(own if index == 0 else _copy(own), [_factors(own, cell, random)]) for index in range(count)]
    rounds = {each: [_step(each, *member, multiplier) for member in members] for each in alive}
    # Forwards and back, so that a clock which drifts favours none.
    us = dict.fromkeys(alive, math.inf)
    for each in (*alive, *reversed(alive)):
        us[each] = min(us[each], timer(rounds[each], slot.weight.device))
    best = min(alive, key=us.__getitem__)
    chosen = best if us[best] < FASTER * us[found[0]] else found[0]
    return Outcome(found[0], chosen, {str(each): us[each] for each in alive}, left_out)


def _bit_equal(
    own: Slot,
    cell: Cell,
    found: Sequence[Candidate],
    random: torch.Generator,
    multiplier: Tensor | None,
    left_out: dict[str, str],
) -> list[Candidate]:
    """The candidates that leave ``own`` as the first does, from each of several draws of the factors."""
    default, *others = found
    for _ in range(2):
        # States of a weight that was never stepped are 0.
        _step(default, own, [_factors(own, cell, random)], multiplier)()
    start = [tensor.clone() for tensor in _written(own)]
    for _ in range(math.ceil(COORDINATES / max(own.weight.numel(), 1))):
        segments = [_factors(own, cell, random)]
        _restore(own, start)
        _step(default, own, segments, multiplier)()
        expected = [tensor.clone() for tensor in _written(own)]
        for each in list(others):
            _restore(own, start)
            problem = _problem(each, own, segments, multiplier)
            if problem is None and not all(map(_same_bits, _written(own), expected)):
                problem = "other bits"
            if problem is not None:
                left_out[str(each)] = problem
                others.remove(each)
        if not others:
            break
    _restore(own, start)
    return [default, *others]


def _problem(candidate: Candidate, own: Slot, segments: Sequence[Segment], multiplier: Tensor | None) -> str | None:
    """Launches ``candidate``; what keeps it from being launched on this device."""
    from triton import TritonError

    try:
        _step(candidate, own, segments, multiplier)()
    except TritonError as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None


def _step(
    candidate: Candidate, own: Slot, segments: Sequence[Segment], multiplier: Tensor | None
) -> Callable[[], None]:
    launch = fused.launch_of(candidate, own, segments, None, multiplier)

    def step() -> None:
        launch(own, segments, None, multiplier)
        if own.late_norms is not None:
            own.late_norms.clear()

    return step


def _copy(slot: Slot) -> Slot:
    """A copy of all that a step of ``slot`` writes."""
    return replace(
        slot,
        weight=slot.weight.detach().clone(),
        states=tuple(state.clone() for state in slot.states),
        master=None if slot.master is None else slot.master.clone(),
        scales=tuple(scale.clone() for scale in slot.scales),
        weight_scale=None if slot.weight_scale is None else slot.weight_scale.clone(),
        noise=None if slot.noise is None else replace(slot.noise, words=slot.noise.words.clone()),
        norm_sq=None if slot.norm_sq is None else torch.empty_like(slot.norm_sq),
        late_norms=None if slot.late_norms is None else [],
        update_norm_sq=None,
    )


def _written(slot: Slot) -> list[Tensor]:
    scale = [] if slot.weight_scale is None else [slot.weight_scale]
    return [*(tensor for _, tensor in slot.tensors()), *slot.scales, *scale]


def _restore(own: Slot, start: Sequence[Tensor]) -> None:
    for tensor, before in zip(_written(own), start, strict=True):
        tensor.copy_(before)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _empty_factors(slot: Slot, cell: Cell) -> Segment:
    dtype = getattr(torch, cell.factors)
    dy, x = (torch.empty(cell.tokens, extent, dtype=dtype, device=slot.weight.device) for extent in cell.shape)
    return dy, x


def _factors(slot: Slot, cell: Cell, random: torch.Generator) -> Segment:
    """Factors of a gradient whose coordinates are around 1."""
    dy, x = _empty_factors(slot, cell)
    return dy.normal_(std=max(cell.tokens, 1) ** -0.5, generator=random), x.normal_(generator=random)
