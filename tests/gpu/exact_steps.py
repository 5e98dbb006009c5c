"""Steps whose gradients are sums of small whole numbers: every order of the sum gives the same fp32 gradient."""

from __future__ import annotations

from dataclasses import replace

import torch

from forge_megatron.formats import Noise, Origin, state_format
from forge_megatron.formats.noise import words
from forge_megatron.kernels import Slot, wgrad_step
from forge_megatron.rules import get

BF16, FP32 = torch.bfloat16, torch.float32

#: state format, weight store
STORAGE = {
    "bf16": ("bf16", "nearest"),
    "fp32-master": ("fp32", "master"),
    "sr-store": ("bf16", "stochastic"),
    "sr-store, fp32": ("fp32", "stochastic"),
}


def whole_numbers(*shape, dtype=BF16, largest=3):
    return torch.randint(-largest, largest + 1, shape, device="cuda").to(dtype)


def make(shape, storage, rule="adamw", step=3):
    fmt, store = STORAGE[storage]
    rule = get(rule)
    weight = torch.randn(shape, device="cuda").to(BF16)
    master = weight.float() + 1e-4 * torch.randn(shape, device="cuda") if store == "master" else None
    states = []
    for name in rule.states:
        nonnegative = name in rule.nonnegative
        values = torch.rand(shape, device="cuda") * 10 ** (4 * torch.rand(shape, device="cuda") - 4)
        values = values if nonnegative else values - values.mean()
        kept = state_format(fmt).allocate(name, weight, nonnegative=nonnegative)
        states.append(kept[name].copy_(values))
    noise = None
    if store == "stochastic":
        origin = Origin("layers.0.weight", row=5, column=8, split=100, jump=1000)
        row = torch.tensor(words(origin, shape[-1], 7, step), device="cuda")
        noise = Noise(row, origin, shape[-1])
    scalars = torch.tensor(rule.scalars(rule.resolve({"lr": 1e-2, "weight_decay": 0.1}), step), device="cuda")
    norm_sq = torch.zeros((), device="cuda")
    return Slot(rule, weight, tuple(states), scalars, master, norm_sq, "w", noise)


def copied(slot):
    def copy(tensors):
        return tuple(tensor.clone() for tensor in tensors)

    master = None if slot.master is None else slot.master.clone()
    norm_sq = torch.zeros_like(slot.norm_sq)
    return replace(
        slot,
        weight=slot.weight.clone(),
        states=copy(slot.states),
        scales=copy(slot.scales),
        master=master,
        norm_sq=norm_sq,
    )


def raw(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def differences(got, want):
    """What differs, by name: how many coordinates, and the first."""
    tensors = [*zip(got.tensors(), want.tensors(), strict=True)]
    pairs = [(name, a, b) for (name, a), (_, b) in tensors]
    found = {}
    for name, a, b in pairs:
        different = (raw(a) != raw(b)).nonzero()
        if len(different):
            first = tuple(different[0].tolist())
            found[name] = (len(different), a.numel(), first, a[first].item(), b[first].item())
    return found


def assert_equal_steps(slot, segments, accumulator=None, steps=2):
    """The Hopper kernel leaves the portable one's bits, and the same norm but for the order of its sum."""
    portable = copied(slot)
    multiplier = torch.tensor(2.0**-9, device="cuda")
    for _ in range(steps):
        for each, backend in ((slot, "hopper"), (portable, "triton")):
            wgrad_step(each, segments, accumulator=accumulator, multiplier=multiplier, backend=backend)
    assert not differences(slot, portable)
    if portable.norm_sq.isfinite():
        torch.testing.assert_close(slot.norm_sq, portable.norm_sq, rtol=1e-5, atol=0.0)
    else:
        assert not slot.norm_sq.isfinite()
