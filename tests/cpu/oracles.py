"""What the code is judged against: torch.optim, or fp64 written by hand. Nothing of forge_megatron is used here."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def assert_rounding(got: Tensor, want: Tensor, roundings: float, dtype=torch.float32) -> None:
    """Assert that no coordinate is further off than ``roundings`` of ``dtype``'s relative roundings of the largest."""
    want = want.cpu().double()
    bound = roundings * torch.finfo(dtype).eps * want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got.cpu().double(), want, rtol=0.0, atol=bound)


def wgrad(segments, accumulator: Tensor | None = None, shape=None) -> Tensor:
    """``sum of dY^T X + accumulator`` in fp64."""
    grad = torch.zeros(shape, dtype=torch.float64) if accumulator is None else accumulator.cpu().double()
    for dy, x in segments:
        grad = grad + dy.cpu().double().t() @ x.cpu().double()
    return grad


@dataclass
class AdamW64:
    """Decoupled weight decay (Loshchilov and Hutter, algorithm 2), with torch.optim.AdamW's order of operations."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False
    states: tuple[str, ...] = field(default=("exp_avg", "exp_avg_sq"), init=False)

    def step(self, w: Tensor, states: tuple[Tensor, ...], g: Tensor, t: int):
        m, v = states
        beta1, beta2 = self.betas
        if self.maximize:
            g = -g
        w = w - self.lr * self.weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        return w - self.lr * m_hat / (v_hat.sqrt() + self.eps), (m, v)


@dataclass
class SGD64:
    """Plain stochastic gradient descent with an L2 penalty."""

    lr: float
    weight_decay: float = 0.0
    maximize: bool = False
    states: tuple[str, ...] = field(default=(), init=False)

    def step(self, w: Tensor, states: tuple[Tensor, ...], g: Tensor, t: int):
        if self.maximize:
            g = -g
        return w - self.lr * (g + self.weight_decay * w), ()


ORACLES = {"adamw": AdamW64, "sgd": SGD64}
TORCH = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
