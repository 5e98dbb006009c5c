"""What each rule is compared with: torch.optim, the authors' package, or the formula by hand.

torch.optim keeps states in the parameter's dtype. To hold fp32 states beside bf16 weights as FORGE's arms do,
each parameter is stepped on its own by an fp32 copy that lives for that step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn


class Fp32States:
    """Steps each parameter by an optimizer of its own, on an fp32 copy: fp32 states and arithmetic.

    Args:
        named: ``(name, parameter)``.
        make: ``make(name, copy) -> optimizer`` of that one copy.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], make: Callable):
        self._steps = []
        for name, p in named:
            copy = nn.Parameter(p.detach().float())
            self._steps.append((p, copy, make(name, copy)))
            copy.data = torch.empty(0, device=p.device)

    @property
    def state(self) -> list[dict]:
        return [dict(optimizer.state) for _, _, optimizer in self._steps]

    @torch.no_grad()
    def step(self) -> None:
        for p, copy, optimizer in self._steps:
            if p.grad is None:
                continue
            copy.data = p.detach().float()
            copy.grad = p.grad.float()
            with torch.enable_grad():
                optimizer.step()
            p.copy_(copy)
            copy.data, copy.grad = torch.empty(0, device=p.device), None

    def zero_grad(self) -> None:
        for p, _, _ in self._steps:
            p.grad = None


class ByHand(torch.optim.Optimizer):
    """A rule that neither torch nor a package has as its paper does: subclasses have ``update(p, g, state, group)``."""

    defaults_: Mapping = MappingProxyType({})

    def __init__(self, params, lr: float, **hyperparameters):
        super().__init__(params, {**self.defaults_, "lr": lr, **hyperparameters})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                self.update(p, p.grad, state, group)


def _moments(state: dict, g: Tensor, squares: Tensor, group: dict) -> tuple[Tensor, Tensor]:
    """Adam's averages of ``g`` and of ``squares``, bias-corrected."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(squares)
    state["exp_avg"].lerp_(g, 1 - beta1)
    state["exp_avg_sq"].lerp_(squares, 1 - beta2)
    t = state["step"]
    return state["exp_avg"] / (1 - beta1**t), state["exp_avg_sq"] / (1 - beta2**t)


class Lamb(ByHand):
    """You et al. 2020, algorithm 2, without the bound on the weight's norm that packages add."""

    defaults_ = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01})

    def update(self, p: Tensor, g: Tensor, state: dict, group: dict) -> None:
        m, v = _moments(state, g, g * g, group)
        u = m.div_(v.sqrt_().add_(group["eps"])).add_(p, alpha=group["weight_decay"])
        p.sub_(u.mul_(group["lr"] * p.norm() / u.norm()))


class AdamMini(ByHand):
    """Zhang et al. 2024, algorithm 1, with a row a block; a vector is one."""

    defaults_ = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})

    def update(self, p: Tensor, g: Tensor, state: dict, group: dict) -> None:
        m, v = _moments(state, g, (g * g).mean(-1, keepdim=True), group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(m.mul_(group["lr"]).div_(v.sqrt_().add_(group["eps"])))


class AdaLomo(ByHand):
    """Lv et al. 2024, algorithm 1; the authors' package has it only inside a loop of its own."""

    defaults_ = MappingProxyType({"decay_rate": -0.8, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "weight_decay": 0.0})

    def update(self, p: Tensor, g: Tensor, state: dict, group: dict) -> None:
        weight = state["step"] ** group["decay_rate"]
        squares = (g * g).add_(group["eps"][0])
        means = (squares.mean(1), squares.mean(0)) if g.dim() > 1 else (squares,)
        for index, mean in enumerate(means):
            state.setdefault(index, torch.zeros_like(mean)).lerp_(mean, weight)
        if g.dim() > 1:
            row, column = (state[index].rsqrt() for index in range(2))
            u = g * row[:, None] * column.mul_(state[0].mean().sqrt())
        else:
            u = g * state[0].rsqrt()
        size = p.square().mean().sqrt().clamp_(min=group["eps"][1]).mul_(group["lr"])
        u.div_((u.square().mean().sqrt() / group["clip_threshold"]).clamp_(min=1.0))
        p.mul_(1 - size * group["weight_decay"]).sub_(u.mul_(size))
