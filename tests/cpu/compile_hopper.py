"""Compile the Hopper kernel for sm_90 with no GPU, every configuration and storage; print what each uses as JSON.

The configuration with the most registers is compiled for every storage, the others for the two extremes.
"""

from __future__ import annotations

import json
import sys

import compile_kernels
import torch
import triton
from compile_kernels import BF16, FP16, FP32

#: weight dtype, state dtype, master, segments, norm and multiplier
LAUNCHES = {
    "bf16": (BF16, BF16, False, 1, False),
    "bf16 norm": (BF16, BF16, False, 1, True),
    "bf16 segments": (BF16, BF16, False, 4, True),
    "fp32-state": (BF16, FP32, False, 1, False),
    "fp32-master": (BF16, FP32, True, 1, True),
    "fp16-master": (FP16, FP32, True, 1, False),
}
EXTREMES = ("bf16 norm", "fp32-master")


def main() -> None:
    triton.runtime.driver.set_active(compile_kernels.Hopper())
    from forge_megatron.kernels import Slot, hopper_wgrad
    from forge_megatron.kernels.hopper_config import CONFIGS
    from forge_megatron.rules import get

    rule = get("adamw")
    used = []
    for name, config in CONFIGS.items():
        for launch in LAUNCHES if name == "pp128" else EXTREMES:
            weight, state, master, count, extras = LAUNCHES[launch]
            slot = Slot(
                rule,
                torch.zeros(256, 512, dtype=weight),
                tuple(torch.zeros(256, 512, dtype=state) for _ in rule.states),
                torch.zeros(rule.n_scalars),
                torch.zeros(256, 512) if master else None,
            )
            segments = [(torch.zeros(64, 256, dtype=weight), torch.zeros(64, 512, dtype=weight)) for _ in range(count)]
            assert hopper_wgrad.supports(slot, segments)
            extra = (torch.zeros(()), torch.zeros(8)) if extras else (None, None)
            fitted = hopper_wgrad.fitted(config, slot)
            positional, keywords = hopper_wgrad.arguments(slot, segments, *extra, fitted)
            kernel = hopper_wgrad.hopper_wgrad_step_kernel.warmup(*positional, grid=(1,), **keywords)
            kernel = kernel.result() if hasattr(kernel, "result") else kernel
            used.append({"launch": launch, "config": name, **compile_kernels.resources(kernel)})
    for name in ("muon", "lamb"):
        stage = get(name).variant(get(name).resolve({"lr": 1.0})).stages.epilogue
        states = tuple(torch.zeros(256, 512, dtype=BF16) for _ in stage.states)
        slot = Slot(stage, torch.zeros(256, 512), states, torch.zeros(stage.n_scalars))
        segments = [(torch.zeros(64, 256, dtype=BF16), torch.zeros(64, 512, dtype=BF16))]
        assert hopper_wgrad.supports(slot, segments)
        fitted = hopper_wgrad.fitted(CONFIGS["pp128"], slot)
        positional, keywords = hopper_wgrad.arguments(slot, segments, torch.zeros(()), torch.zeros(8), fitted)
        kernel = hopper_wgrad.hopper_wgrad_step_kernel.warmup(*positional, grid=(1,), **keywords)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        used.append({"launch": f"epilogue of {name}", "config": "pp128", **compile_kernels.resources(kernel)})
    json.dump(used, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
