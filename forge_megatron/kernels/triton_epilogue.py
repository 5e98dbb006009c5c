"""What every Triton kernel does with a gradient: load, step, keep what is not finite, store."""

# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

import triton
import triton.language as tl

from .triton_language import is_finite, round_to
from .triton_noise import round_stochastically


@triton.jit
def step_coordinates(g, inside, weight, master, states, h, bits, UPDATE: tl.constexpr, FORMATS: tl.constexpr):
    """Step the coordinates that the pointers name by their gradient.

    Args:
        g: fp32; every other argument has its shape.
        inside: where there is a coordinate at all.
        weight, states: pointers; master: pointers, or None.
        h: the rule's scalars.
        bits: uint32, to round the weight stochastically, or None.
        FORMATS: ``(decode, encode)`` of each state.
    """
    if master is not None:
        w = tl.load(master, mask=inside, other=0.0)
    else:
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    old = ()
    for index in tl.static_range(len(states)):
        old = old + (FORMATS[index][0](tl.load(states[index], mask=inside, other=0.0)),)
    new_w, new = UPDATE(g, w, old, h)
    # Selecting values, not masking stores: a mask that differs between neighbours would split
    # every vector store.
    finite = is_finite(g)
    for index in tl.static_range(len(states)):
        kept = tl.where(finite, new[index], old[index])
        tl.store(states[index], FORMATS[index][1](kept), mask=inside)
    w = tl.where(finite, new_w, w)
    if master is not None:
        tl.store(master, w, mask=inside)
    if bits is not None:
        tl.store(weight, round_stochastically(w, bits), mask=inside)
    else:
        tl.store(weight, round_to(w, weight.dtype.element_ty), mask=inside)
