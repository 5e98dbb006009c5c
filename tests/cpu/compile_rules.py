"""Compile one step of every form of every rule for sm_90 with no GPU, in both kernels; print what each uses as JSON.

bf16 weights and states in the largest tiles, with the gradient's norm: the launch that needs the most registers.
"""

from __future__ import annotations

import json
import sys

import compile_kernels
import kernel_cases
import oracles
import torch
import triton
from compile_kernels import BF16
from triton.runtime.jit import JITFunction


def main(kernel: str) -> None:
    triton.runtime.driver.set_active(compile_kernels.Hopper())
    from forge_megatron.kernels import Slot, triton_wgrad

    launch = JITFunction.run
    compiled = []

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    used = {}
    for form in oracles.FORMS:
        rule, _ = kernel_cases.rule_and_scalars(form)
        if rule in used:  # a form that differs in the values of its scalars
            continue
        slot = Slot(
            rule,
            torch.zeros(2048, 2048, dtype=BF16),
            tuple(torch.zeros(2048, 2048, dtype=BF16) for _ in rule.states),
            torch.zeros(rule.n_scalars),
            norm_sq=torch.zeros(()),
        )
        segments = [(torch.zeros(512, 2048, dtype=BF16), torch.zeros(512, 2048, dtype=BF16))]
        if kernel == "portable":
            JITFunction.run = compile_only
            triton_wgrad.wgrad_step(slot, segments, None, torch.zeros(()))
            JITFunction.run = launch
            step = compiled.pop()
        else:
            from forge_megatron.kernels import hopper_wgrad
            from forge_megatron.kernels.hopper_config import CONFIGS

            assert hopper_wgrad.supports(slot, segments)
            config = hopper_wgrad.fitted_to(CONFIGS["co256"], slot)
            positional, keywords = hopper_wgrad.arguments(slot, segments, None, torch.zeros(()), torch.zeros(8), config)
            step = hopper_wgrad.hopper_wgrad_step_kernel.warmup(*positional, grid=(1,), **keywords)
        step = step.result() if hasattr(step, "result") else step
        used[rule] = {"form": form, **compile_kernels.resources(step)}
    json.dump(list(used.values()), sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
