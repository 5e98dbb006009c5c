"""Compile the Hopper kernel for sm_90 with no GPU, every configuration and storage; print what each uses as JSON.

The configuration with the most registers is compiled for every storage, the others for the extremes.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import compile_kernels
import torch
import triton
from compile_kernels import BF16, FP16, FP32

#: weight dtype, state format, what the weight's rounding needs, accumulator's dtype, segments, norm and multiplier
LAUNCHES = {
    "bf16": (BF16, "bf16", None, None, 1, False),
    "bf16 norm": (BF16, "bf16", None, None, 1, True),
    "bf16 segments": (BF16, "bf16", None, None, 4, True),
    "bf16 noise": (BF16, "bf16", "noise", None, 1, True),
    "bf16 accumulator": (BF16, "bf16", None, FP32, 1, True),
    "fp32-state": (BF16, "fp32", None, None, 1, False),
    "fp32-master": (BF16, "fp32", "master", None, 1, True),
    "fp32-master accumulator": (BF16, "fp32", "master", BF16, 1, True),
    "fp16-master": (FP16, "fp32", "master", None, 1, False),
    "fp32 noise": (BF16, "fp32", "noise", None, 1, True),
}
EXTREMES = ("bf16 norm", "fp32-master", "fp32 noise")
#: What experts are compiled for too.
OF_EXPERTS = ("bf16 segments", "fp32 noise")
EXPERTS = 3


def stacked(tensor):
    return torch.stack([tensor] * EXPERTS)


def of_experts(slot):
    return dataclasses.replace(
        slot,
        weight=stacked(slot.weight),
        states=tuple(map(stacked, slot.states)),
        master=None if slot.master is None else stacked(slot.master),
    )


def main() -> None:
    triton.runtime.driver.set_active(compile_kernels.Hopper())
    from forge_megatron.formats import Noise, Origin, state_format
    from forge_megatron.kernels import GroupedRows, Slot, hopper_wgrad
    from forge_megatron.kernels.hopper_config import CONFIGS
    from forge_megatron.kernels.hopper_kernel import hopper_wgrad_step_kernel
    from forge_megatron.rules import get

    shape = (256, 512)
    used = []

    def experts_factors(count=1):
        """Of experts in one tensor ``[EXPERTS, *shape]``."""
        bounds = torch.zeros(EXPERTS + 1, dtype=torch.int32)
        return [(GroupedRows(dy, bounds), x) for dy, x in factors(BF16, count)]

    def factors(dtype, count=1):
        return [(torch.zeros(64, shape[0], dtype=dtype), torch.zeros(64, shape[1], dtype=dtype)) for _ in range(count)]

    def compiled(launch, name, positional, keywords):
        kernel = hopper_wgrad_step_kernel.warmup(*positional, grid=(1,), **keywords)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        used.append({"launch": launch, "config": name, **compile_kernels.resources(kernel)})

    rule = get("adamw")
    for name, config in CONFIGS.items():
        for launch in LAUNCHES if name == "pp128" else EXTREMES:
            dtype, fmt, store, added, count, extras = LAUNCHES[launch]
            weight = torch.zeros(shape, dtype=dtype)
            state = {}
            for each in rule.states:
                state.update(state_format(fmt).allocate(each, weight, nonnegative=each in rule.nonnegative))
            slot = Slot(
                rule,
                weight,
                tuple(state[each] for each in rule.states),
                torch.zeros(rule.n_scalars),
                torch.zeros(shape) if store == "master" else None,
                noise=Noise(torch.zeros(7, dtype=torch.int64), Origin("w"), shape[1]) if store == "noise" else None,
            )
            segments = factors(dtype, count)
            accumulator = None if added is None else torch.zeros(shape, dtype=added)
            assert hopper_wgrad.supports(slot, segments, accumulator)
            extra = (torch.zeros(()), torch.zeros(8)) if extras else (None, None)
            fitted = hopper_wgrad.fitted_to(config, slot, accumulator)
            compiled(launch, name, *hopper_wgrad.arguments(slot, segments, accumulator, *extra, fitted))
            if launch in OF_EXPERTS:
                slot, accumulator = of_experts(slot), None if accumulator is None else stacked(accumulator)
                segments = experts_factors(count)
                assert hopper_wgrad.supports(slot, segments, accumulator)
                compiled(
                    f"experts {launch}", name, *hopper_wgrad.arguments(slot, segments, accumulator, *extra, fitted)
                )
        for launch, dtype, add in (("add", BF16, True), ("write", FP32, False), ("norm", None, False)):
            held = [] if dtype is None else [torch.zeros(shape, dtype=dtype)]
            compiled(launch, name, *hopper_wgrad.gradient_arguments(factors(BF16), config, held, add, torch.zeros(8)))
    held = [torch.zeros(EXPERTS, *shape)]
    arguments = hopper_wgrad.gradient_arguments(experts_factors(), CONFIGS["pp128"], held, False, None)
    compiled("experts write", "pp128", *arguments)
    for name in ("muon", "lamb"):
        stage = get(name).variant(get(name).resolve({"lr": 1.0})).stages.epilogue
        states = tuple(torch.zeros(shape, dtype=BF16) for _ in stage.states)
        slot = Slot(stage, torch.zeros(shape), states, torch.zeros(stage.n_scalars))
        assert hopper_wgrad.supports(slot, factors(BF16))
        fitted = hopper_wgrad.fitted_to(CONFIGS["pp128"], slot)
        extra = (torch.zeros(()), torch.zeros(8))
        compiled(f"epilogue of {name}", "pp128", *hopper_wgrad.arguments(slot, factors(BF16), None, *extra, fitted))
    json.dump(used, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
