"""Compile the kernels as they are launched, for sm_90, with no GPU; print what each one uses as JSON.

Run by ``test_kernels_compile.py`` in a process of its own: Triton compiles or interprets, not both. ``cuobjdump`` comes
with Triton.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

#: weight dtype, state format, master
STORAGE = {
    "bf16": (BF16, "bf16", False),
    "bf16-noise": (BF16, "bf16", False),
    "int8": (BF16, "int8", False),
    "fp8": (BF16, "fp8", False),
    "int8-noise": (BF16, "int8", False),
    "codes-noise": (torch.float8_e4m3fn, "bf16", False),
    "int8-codes-noise": (torch.float8_e4m3fn, "int8", False),
    "fp16-master": (FP16, "fp32", True),
    "fp32": (FP32, "fp32", False),
}
#: shape, tokens of each segment, accumulator's dtype
LAUNCHES = {
    "large": ((2048, 2048), (512,), None),
    "segments": ((2048, 2048), (512, 512, 512, 512), FP32),
    "small": ((512, 512), (512,), None),
    "odd": ((333, 101), (17, 5), FP32),
    "lookup": ((2048, 2048), (), None),
    "tied": ((2048, 2048), (512,), None),
}
COMPILED = [
    ("bf16", "large"),
    ("bf16-noise", "large"),
    ("bf16-noise", "odd"),
    ("int8", "large"),
    ("int8-noise", "odd"),
    ("fp8", "large"),
    ("codes-noise", "large"),
    ("codes-noise", "odd"),
    ("int8-codes-noise", "large"),
    ("bf16", "small"),
    ("bf16", "odd"),
    ("bf16", "lookup"),
    ("bf16-noise", "lookup"),
    ("int8-noise", "lookup"),
    ("codes-noise", "lookup"),
    ("bf16", "tied"),
    ("fp32", "lookup"),
    ("fp16-master", "segments"),
    ("fp16-master", "small"),
    ("fp16-master", "odd"),
    ("fp32", "segments"),
    ("fp32", "odd"),
]
ELEMENTWISE = [
    ("bf16", 4096),
    ("bf16-noise", 4096),
    ("bf16-noise", 4097),
    ("int8", 4096),
    ("int8-noise", 4097),
    ("fp8", 4096),
    ("codes-noise", 4096),
    ("int8-codes-noise", 4096),
    ("fp16-master", 4096),
    ("fp16-master", 4097),
]
#: Rules whose stages are compiled: every kind of epilogue and of apply.
STAGED = ("muon", "lamb", "lars")
#: Those whose measures are: of rows, of rows and columns, of the whole, largest values.
MEASURED = ("adam_mini", "adafactor", "adalomo", "lamb", "lars", "sm3")


class Hopper:
    """Stands in for the driver of a GPU that is not there: enough of it to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        return ty_to_cpp(ty)


class NotLaunched:
    """What a launch returns to those who would launch it again."""

    run = SimpleNamespace(global_scratch_size=1, profile_scratch_size=0)

    def __getitem__(self, grid):
        return lambda *arguments: None


def resources(kernel) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, _, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text).groups()
    return {
        "registers": int(registers),
        "spilled_bytes": int(stack) + int(local),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "vector_stores": len(re.findall(r"st\.global\S*\.v", kernel.asm["ptx"])),
    }


def main() -> None:
    triton.runtime.driver.set_active(Hopper())
    compiled = {}
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        compiled[label, self.__name__] = resources(kernel)
        return NotLaunched()

    JITFunction.run = compile_only
    # The entrance would choose the reference for CPU tensors; what is compiled here is what it calls on a GPU.
    from forge_megatron.formats import Noise, Origin, scale_name, state_format
    from forge_megatron.formats.code import scale_shape
    from forge_megatron.kernels import (
        GroupedRows,
        Slot,
        choice,
        cublas_wgrad,
        fused,
        regimes,
        softmax,
        staged,
        triton_norms,
        triton_softmax,
        triton_step,
        triton_wgrad,
    )
    from forge_megatron.rules import get
    from forge_megatron.rules.projection import ADAM

    rule = get("adamw")

    def slot(shape, storage):
        weight, fmt, master = STORAGE[storage]
        weight = torch.zeros(shape, dtype=weight)
        state = {}
        for name in rule.states:
            state.update(state_format(fmt).allocate(name, weight, nonnegative=name in rule.nonnegative))
        states = tuple(state[name] for name in rule.states)
        scales = tuple(state[scale_name(name)] for name in rule.states if scale_name(name) in state)
        scalars = torch.zeros(rule.n_scalars)
        copy = torch.zeros(shape) if master else None
        noise = Noise(torch.zeros(7, dtype=torch.int64), Origin("w"), shape[-1]) if "noise" in storage else None
        slot = Slot(rule, weight, states, scalars, copy, norm_sq=torch.zeros(()), noise=noise, scales=scales)
        return replace(slot, weight_scale=torch.zeros(scale_shape(weight.shape)) if "codes" in storage else None)

    for storage, name in COMPILED:
        label = f"{storage} {name}"
        weight = BF16 if "codes" in storage else STORAGE[storage][0]
        shape, tokens, accumulator = LAUNCHES[name]
        segments = [tuple(torch.zeros(t, n, dtype=weight) for n in shape) for t in tokens]
        if name in ("lookup", "tied"):
            segments.append((torch.zeros(512, dtype=torch.int64), torch.zeros(512, shape[1], dtype=weight)))
        added = None if accumulator is None else torch.zeros(shape, dtype=accumulator)
        triton_wgrad.wgrad_step(slot(shape, storage), segments, added, torch.zeros(()))
        if name == "segments":
            triton_wgrad.wgrad_norm_sq(segments, torch.zeros(()), added, torch.Size(shape))
            known = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.bool)
            triton_wgrad.wgrad_norm_sq(segments, torch.zeros(()), None, torch.Size(shape), known)
            triton_wgrad.wgrad_write(segments, added, added)
            triton_wgrad.wgrad_write(segments, torch.zeros(shape, dtype=torch.bfloat16), None)
    for storage, extents in (("bf16", (4, 1024, 1024)), ("int8", (4, 1024, 1024)), ("bf16-noise", (3, 333, 101))):
        label = f"{storage} grouped{' odd' if extents[-1] % 16 else ''}"
        experts, *shape = extents
        dy, x = (torch.zeros(512, extent, dtype=BF16) for extent in shape)
        segments = [(GroupedRows(dy, torch.zeros(experts + 1, dtype=torch.int32)), x)] * 2
        triton_wgrad.wgrad_step(slot(extents, storage), segments, torch.zeros(extents), torch.zeros(()))
    for storage, size in ELEMENTWISE:
        label = f"{storage} {size}"
        grad = torch.zeros(size, dtype=BF16 if "codes" in storage else STORAGE[storage][0])
        triton_step.step([slot((size,), storage)], [grad], None)
    for storage in ("bf16", "bf16-noise", "int8", "int8-noise", "fp8", "codes-noise", "int8-codes-noise"):
        label = f"{storage} dense"
        cublas_wgrad.dense_step(slot((512, 512), storage), torch.zeros(512, 512), torch.zeros(()))
    for name in STAGED:
        label = f"stage of {name}"
        stages = get(name).variant(get(name).resolve({"lr": 1.0})).stages
        for stage, weight in ((stages.epilogue, FP32), (stages.apply, BF16)):
            states = tuple(torch.zeros(2048, 2048, dtype=BF16) for _ in stage.states)
            scalars, norm = torch.zeros(stage.n_scalars), torch.zeros(())
            half = Slot(stage, torch.zeros(2048, 2048, dtype=weight), states, scalars, norm_sq=norm)
            if stages.measures and stage is stages.apply:
                continue
            if stage is stages.apply:
                triton_step.step([half], [torch.zeros(2048, 2048)], None)
                cublas_wgrad.dense_step(replace(half, norm_sq=None), torch.zeros(2048, 2048), None)
            else:
                triton_wgrad.wgrad_step(half, [(torch.zeros(512, 2048, dtype=BF16),) * 2], None, torch.zeros(()))
    choice.resolve_backend = fused.resolve_backend = lambda device, backend: backend
    for name, shape in itertools.product(MEASURED, ((2048, 2048), (333, 101))):
        rule = get(name).variant(get(name).resolve({"lr": 1.0}))
        states = tuple(torch.zeros(shape, dtype=BF16) for _ in rule.states)
        group = rule.resolve({"lr": 1.0})
        statistics = tuple(map(torch.zeros, rule.statistics(group, torch.Size(shape)).values()))
        half = Slot(rule, torch.zeros(shape, dtype=BF16), states, torch.zeros(rule.n_scalars), statistics=statistics)
        half.norm_sq = torch.zeros(())
        segments = [tuple(torch.zeros(512, extent, dtype=BF16) for extent in shape)]
        label = f"formed and measured by {name}{' odd' if shape[1] % 16 else ''}"
        staged.Launch("triton")(half, segments, None, torch.zeros(()))
        label = label.replace("formed and measured", "measured")
        half.memo.clear()
        regimes.step([half], [torch.zeros(shape)], torch.zeros(()), "triton")
    label = "measured codes"
    rule = get("lars").variant(get("lars").resolve({"lr": 1.0}))
    coded = slot((2048, 2048), "codes-noise")
    momentum, scalars = torch.zeros(2048, 2048, dtype=BF16), torch.zeros(rule.n_scalars)
    coded = replace(coded, rule=rule, states=(momentum,), scalars=scalars, weight_dtype=BF16)
    regimes.step([coded], [torch.zeros(2048, 2048)], torch.zeros(()), "triton")
    for channels in (torch.zeros(2048, 1), torch.zeros(1, 2048)):
        label = f"channels {list(channels.shape)}"
        apply = get("apollo").variant(get("apollo").resolve({"lr": 1.0})).stages.apply
        half = Slot(
            apply, torch.zeros(2048, 2048, dtype=BF16), (), torch.zeros(apply.n_scalars), norm_sq=torch.zeros(())
        )
        segments = [(torch.zeros(512, 2048, dtype=BF16),) * 2]
        triton_wgrad.wgrad_step(half, segments, None, torch.zeros(()), channels)
        triton_wgrad.wgrad_norm_sq(segments, torch.zeros(()), None, half.weight.shape, None, channels)
    label = "low-rank adam"
    low = torch.zeros(2048, 256)
    triton_step.step([Slot(ADAM, low, (low, low), torch.zeros(ADAM.n_scalars))], [low], torch.zeros(()))
    label = "norms"
    segments = [[(torch.zeros(512, 2048, dtype=BF16),) * 2]] * 2
    triton_norms.wgrad_norms_sq(segments, [torch.zeros(()), torch.zeros(())], [(2048, 2048)] * 2)
    label = "head"
    normaliser = softmax.Normaliser(torch.zeros(64, dtype=torch.int64), "triton")
    block, bias = torch.zeros(64, 4096), torch.zeros(4096, dtype=BF16)
    triton_softmax.add(normaliser, block, bias, 16)
    weights = normaliser.maximum, normaliser.maximum, normaliser.maximum
    triton_softmax.gradient(block, bias, normaliser.targets, normaliser.maximum, weights, 16, BF16)
    json.dump([{"launch": k[0], "kernel": k[1], **v} for k, v in compiled.items()], sys.stdout, indent=1)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "TRITON_INTERPRET is set: nothing would be compiled"
    main()
