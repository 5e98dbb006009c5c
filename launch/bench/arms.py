"""The arms of one GPU, and the register of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import forge_megatron as forge
from launch.bench import deepspeed_arms, megatron_arms, parallel_arms, peers, rule_arms
from launch.bench.arm import Arm, InBackward, Settings

CLIP, MICRO_BATCHES = 1.0, 4


def _torch(**how) -> Callable:
    return lambda model, settings: torch.optim.AdamW(model.parameters(), **settings.adamw, **how)


def _forge(**how) -> Callable:
    return lambda model, settings: forge.attach(model, "adamw", **settings.adamw, **how)


def fused_in_backward(model: nn.Module, settings: Settings) -> InBackward:
    """torch's own recipe: an optimizer a parameter, stepped by its post-accumulate hook."""
    optimizers = []
    for p in model.parameters():
        optimizer = torch.optim.AdamW([p], **settings.adamw, fused=True)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
        optimizers.append(optimizer)
    return InBackward(*optimizers)


def _captured(arm: Arm, against: str | None = None) -> Arm:
    return replace(arm, captured=True, against=against)


def _single() -> dict[str, Arm]:
    foreach, fused = Arm(_torch(foreach=True)), Arm(_torch(fused=True))
    # A captured optimizer reads its step count on the device.
    for_capture = Arm(_torch(fused=True, capturable=True))
    whole, head = Arm(_forge()), Arm(_forge(), fused_head=True)
    clipped = {"clip": CLIP, "judge": "adamw-foreach-clip", "against": "adamw-fused-clip"}
    # FORGE clips by itself: the loop must not.
    clipped_in_step = Arm(_forge(clip_grad_norm=CLIP), judge="adamw-foreach-clip", against="adamw-fused-clip")
    summed = {"micro_batches": MICRO_BATCHES, "judge": "adamw-foreach-micro", "against": "adamw-fused-micro"}
    summed_here = Arm(_forge(accumulation_steps=MICRO_BATCHES), **summed)
    return {
        "adamw-foreach": foreach,
        "adamw-fused": fused,
        "adamw-fused-captured": _captured(for_capture),
        "adamw-fused-liger-loss": replace(fused, liger_loss=True, package="liger-kernel"),
        "adamw-fused-in-backward": Arm(fused_in_backward),
        "forge": whole,
        "forge-captured": _captured(whole),
        "forge-head": head,
        "forge-head-captured": _captured(head),
        "forge-int8": Arm(_forge(state_format="int8"), bound=None),
        "forge-int8-captured": Arm(_forge(state_format="int8"), bound=None, captured=True),
        "forge-int8-head": Arm(_forge(state_format="int8"), bound=None, fused_head=True),
        "forge-int8-head-captured": Arm(_forge(state_format="int8"), bound=None, captured=True, fused_head=True),
        "forge-fp8": Arm(_forge(state_format="fp8"), bound=None),
        "forge-fp8-captured": Arm(_forge(state_format="fp8"), bound=None, captured=True),
        "adamw-foreach-clip": replace(foreach, **clipped),
        "adamw-fused-clip": replace(fused, **clipped),
        "adamw-fused-clip-captured": _captured(replace(for_capture, **clipped), "adamw-fused-clip-captured"),
        "forge-clip": clipped_in_step,
        "forge-clip-captured": _captured(clipped_in_step, "adamw-fused-clip-captured"),
        "adamw-foreach-micro": replace(foreach, **summed),
        "adamw-fused-micro": replace(fused, **summed),
        "adamw-fused-micro-captured": _captured(replace(for_capture, **summed), "adamw-fused-micro-captured"),
        "forge-micro": summed_here,
        "forge-micro-captured": _captured(summed_here, "adamw-fused-micro-captured"),
        "forge-head-micro-captured": _captured(replace(summed_here, fused_head=True), "adamw-fused-micro-captured"),
    }


ARMS: dict[str, Arm] = {
    **_single(),
    **peers.ARMS,
    **rule_arms.arms(),
    **parallel_arms.ARMS,
    **deepspeed_arms.ARMS,
    **megatron_arms.ARMS,
}

BUCKETED = {name for name, arm in ARMS.items() if arm.bucketed}


def get(name: str) -> Arm:
    """Raises ``ValueError`` that lists the arms."""
    if name not in ARMS:
        raise ValueError(f"there is no arm {name!r}; there are: {', '.join(ARMS)}")
    return ARMS[name]
