"""Memory-saving optimizers of other packages, as their own pages say to use them."""

from __future__ import annotations

import torch
from torch import nn

from launch.bench.arm import Arm, InBackward, Settings


def optimi_release(model: nn.Module, settings: Settings):
    from optimi import AdamW, prepare_for_gradient_release

    # Kahan summation is another weight store than nearest.
    optimizer = AdamW(model.parameters(), **settings.adamw, gradient_release=True, kahan_sum=False)
    prepare_for_gradient_release(model, optimizer)
    return optimizer


def flashoptim_release(model: nn.Module, settings: Settings):
    from flashoptim import FlashAdamW, enable_gradient_release

    optimizer = FlashAdamW(model.parameters(), **settings.adamw, quantize=False, master_weight_bits=None)
    return InBackward(optimizer, keep=enable_gradient_release(model, optimizer))


def bitsandbytes_8bit(model: nn.Module, settings: Settings):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), **settings.adamw)


def bitsandbytes_lion_8bit(model: nn.Module, settings: Settings):
    import bitsandbytes

    # Lion's rate and decay beside AdamW's, as the rules' bench has them.
    return bitsandbytes.optim.Lion8bit(model.parameters(), lr=0.1 * settings.lr, weight_decay=1.0)


def torchao_8bit(model: nn.Module, settings: Settings):
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), **settings.adamw)


def low_rank_groups(named, **group) -> list[dict]:
    """Two groups: the matrices of the layers with the projection's options, and everything else."""
    named = list(named)
    matrices = [p for name, p in named if p.dim() == 2 and "layers" in name]
    chosen = set(matrices)
    others = [p for _, p in named if p not in chosen]
    return [each for each in ({"params": others}, {"params": matrices, **group}) if each["params"]]


GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO = {
    "rank": 256,
    "update_proj_gap": 200,
    "scale": 1.0,
    "proj": "random",
    "scale_type": "channel",
    "proj_type": "std",
}


def galore(model: nn.Module, settings: Settings):
    from galore_torch import GaLoreAdamW

    groups = low_rank_groups(model.named_parameters(), **GALORE)
    return GaLoreAdamW(groups, **settings.adamw, no_deprecation_warning=True)


def apollo(model: nn.Module, settings: Settings):
    from apollo_torch import APOLLOAdamW

    return APOLLOAdamW(low_rank_groups(model.named_parameters(), **APOLLO), **settings.adamw)


class AdaLomoLoop:
    """The package's loop: ``fused_backward`` runs backward and has stepped every parameter at its end."""

    def __init__(self, model: nn.Module, settings: Settings):
        from lomo_optim import AdaLomo

        self.optimizer = AdaLomo(model, lr=settings.lr, weight_decay=settings.weight_decay)
        self._lr = settings.lr

    @property
    def state(self) -> list[dict]:
        return [self.optimizer.exp_avg_sq, self.optimizer.exp_avg_sq_row, self.optimizer.exp_avg_sq_col]

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.fused_backward(loss, self._lr)

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


#: GaLore, APOLLO and AdaLomo are other rules than AdamW: how far they go apart from it is reported.
ARMS: dict[str, Arm] = {
    "optimi": Arm(optimi_release, package="torch-optimi"),
    "flashoptim": Arm(flashoptim_release, package="flashoptim"),
    "bitsandbytes-8bit": Arm(bitsandbytes_8bit, bound=None, package="bitsandbytes"),
    "bitsandbytes-lion-8bit": Arm(
        bitsandbytes_lion_8bit,
        judge="lion-reference",
        bound=None,
        stepwise=True,
        against="lion-stored",
        package="bitsandbytes",
    ),
    "torchao-8bit": Arm(torchao_8bit, bound=None, package="torchao"),
    "galore": Arm(galore, bound=None, package="galore-torch"),
    "apollo": Arm(apollo, bound=None, package="apollo-torch"),
    "adalomo": Arm(AdaLomoLoop, bound=None, package="lomo-optim"),
}
