"""The arms: each makes a model trainable and returns what is stepped. One function, one arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import forge_megatron as forge

BETAS, EPS = (0.9, 0.999), 1e-8


class InBackward:
    """Steps in hooks that have already run; what is left for the loop is nothing."""

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        attach: ``(model, lr, weight_decay) -> optimizer`` with ``step`` and ``zero_grad``.
        exact: its update is ``torch.optim.AdamW``'s; otherwise its distance from it is reported, not bounded.
        package: what must be installed, as pip names it; None: torch alone.
        captured: the whole step is one CUDA graph.
        fused_head: the loss is taken by blocks of the vocabulary, without logits.
    """

    attach: Callable
    exact: bool = True
    package: str | None = None
    captured: bool = False
    fused_head: bool = False


def _hyperparameters(lr: float, weight_decay: float) -> dict:
    return {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": weight_decay}


def _torch(**how) -> Callable:
    return lambda model, lr, weight_decay: torch.optim.AdamW(
        model.parameters(), **_hyperparameters(lr, weight_decay), **how
    )


def _forge(**how) -> Callable:
    return lambda model, lr, weight_decay: forge.attach(model, "adamw", **_hyperparameters(lr, weight_decay), **how)


def fused_in_backward(model: nn.Module, lr: float, weight_decay: float) -> InBackward:
    """torch's own recipe: an optimizer a parameter, stepped by its post-accumulate hook."""
    for p in model.parameters():
        optimizer = torch.optim.AdamW([p], **_hyperparameters(lr, weight_decay), fused=True)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    return InBackward()


def optimi_release(model: nn.Module, lr: float, weight_decay: float):
    from optimi import AdamW, prepare_for_gradient_release

    # Kahan summation is another weight store than nearest.
    optimizer = AdamW(model.parameters(), **_hyperparameters(lr, weight_decay), gradient_release=True, kahan_sum=False)
    prepare_for_gradient_release(model, optimizer)
    return optimizer


def flashoptim_release(model: nn.Module, lr: float, weight_decay: float) -> InBackward:
    from flashoptim import FlashAdamW, enable_gradient_release

    optimizer = FlashAdamW(
        model.parameters(), **_hyperparameters(lr, weight_decay), quantize=False, master_weight_bits=None
    )
    handle = enable_gradient_release(model, optimizer)
    released = InBackward()
    released.keep = (optimizer, handle)
    return released


def bitsandbytes_8bit(model: nn.Module, lr: float, weight_decay: float):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), **_hyperparameters(lr, weight_decay))


def torchao_8bit(model: nn.Module, lr: float, weight_decay: float):
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), **_hyperparameters(lr, weight_decay))


def _low_rank(model: nn.Module, **group) -> list[dict]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    return [{"params": others}, {"params": matrices, **group}]


def galore(model: nn.Module, lr: float, weight_decay: float):
    from galore_torch import GaLoreAdamW

    groups = _low_rank(model, rank=128, update_proj_gap=200, scale=0.25, proj_type="std")
    return GaLoreAdamW(groups, lr=lr, betas=BETAS, eps=EPS, weight_decay=weight_decay)


def apollo(model: nn.Module, lr: float, weight_decay: float):
    from apollo_torch import APOLLOAdamW

    group = {"rank": 256, "proj": "random", "scale_type": "channel", "scale": 1.0}
    groups = _low_rank(model, **group, update_proj_gap=200, proj_type="std")
    return APOLLOAdamW(groups, lr=lr, betas=BETAS, eps=EPS, weight_decay=weight_decay)


ARMS: dict[str, Arm] = {
    "adamw-foreach": Arm(_torch(foreach=True)),
    "adamw-fused": Arm(_torch(fused=True)),
    "adamw-fused-captured": Arm(_torch(fused=True, capturable=True), captured=True),
    "adamw-fused-in-backward": Arm(fused_in_backward),
    "optimi": Arm(optimi_release, package="torch-optimi"),
    "flashoptim": Arm(flashoptim_release, package="flashoptim"),
    "bitsandbytes-8bit": Arm(bitsandbytes_8bit, exact=False, package="bitsandbytes"),
    "torchao-8bit": Arm(torchao_8bit, exact=False, package="torchao"),
    "galore": Arm(galore, exact=False, package="galore-torch"),
    "apollo": Arm(apollo, exact=False, package="apollo-torch"),
    "forge": Arm(_forge()),
    "forge-captured": Arm(_forge(), captured=True),
    "forge-head": Arm(_forge(), fused_head=True),
    "forge-head-captured": Arm(_forge(), captured=True, fused_head=True),
    "forge-int8": Arm(_forge(state_format="int8"), exact=False),
    "forge-fp8": Arm(_forge(state_format="fp8"), exact=False),
    "forge-clip": Arm(_forge(clip_grad_norm=1.0), exact=False),
}


def get(name: str) -> Arm:
    """Raises ``ValueError`` that lists the arms."""
    if name not in ARMS:
        raise ValueError(f"there is no arm {name!r}; there are: {', '.join(ARMS)}")
    return ARMS[name]
