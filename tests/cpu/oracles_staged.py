"""What rules in stages are judged against, where torch.optim has none: fp64 by hand, from the authors' formulas.

Each is ``step(w, state, g, t)``: fp64 tensors, ``state`` a dict that it fills at ``t == 1``, ``t`` from 1; it
returns the new weight. Nothing of forge_megatron is used here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def moments(state: dict, g: Tensor, betas: tuple[float, float], second: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's two moving averages, of ``g`` and of ``second``."""
    state["exp_avg"] = betas[0] * state.get("exp_avg", torch.zeros_like(g)) + (1 - betas[0]) * g
    state["exp_avg_sq"] = betas[1] * state.get("exp_avg_sq", torch.zeros_like(second)) + (1 - betas[1]) * second
    return state["exp_avg"], state["exp_avg_sq"]


@dataclass
class Lamb64:
    """You et al. 2020, algorithm 2."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def step(self, w: Tensor, state: dict, g: Tensor, t: int) -> Tensor:
        m, v = moments(state, g, self.betas, g**2)
        r = m / (1 - self.betas[0] ** t) / ((v / (1 - self.betas[1] ** t)).sqrt() + self.eps)
        u = r + self.weight_decay * w
        return w - self.lr * w.norm() / u.norm() * u


@dataclass
class AdaLomo64:
    """Lv et al. 2024, algorithm 1, with the decay rate of the authors' code."""

    lr: float
    decay_rate: float = -0.8
    eps1: float = 1e-30
    eps2: float = 1e-3
    clip_threshold: float = 1.0
    weight_decay: float = 0.0

    def step(self, w: Tensor, state: dict, g: Tensor, t: int) -> Tensor:
        beta = 1 - t**self.decay_rate
        squares = g**2 + self.eps1
        names = ("exp_avg_sq_row", "exp_avg_sq_col") if g.dim() > 1 else ("exp_avg_sq",)
        now = (squares.mean(-1), squares.mean(-2)) if g.dim() > 1 else (squares,)
        for name, value in zip(names, now, strict=True):
            state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
        if g.dim() > 1:
            row, column = (state[name] for name in names)
            v = row[..., :, None] * column[..., None, :] / row.mean(-1)[..., None, None]
        else:
            v = state["exp_avg_sq"]
        u = g / v.sqrt()
        step_size = self.lr * max(self.eps2, w.square().mean().sqrt().item())
        u = u / max(1.0, u.square().mean().sqrt().item() / self.clip_threshold)
        return w * (1 - step_size * self.weight_decay) - step_size * u


@dataclass
class AdamMini64:
    """Zhang et al. 2024, algorithm 1, on blocks of rows; ``block_rows=None`` is one block."""

    lr: float
    block_rows: int | None = 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def step(self, w: Tensor, state: dict, g: Tensor, t: int) -> Tensor:
        rows = self.block_rows if self.block_rows and g.dim() > 1 else g.shape[0]
        blocks = torch.stack([block.square().mean() for block in g.split(rows)])
        m, v = moments(state, g, self.betas, blocks)
        v_hat = (v / (1 - self.betas[1] ** t)).repeat_interleave(rows).view(-1, *[1] * (g.dim() - 1))
        w = w - self.lr * self.weight_decay * w
        return w - self.lr * m / (1 - self.betas[0] ** t) / (v_hat.sqrt() + self.eps)


@dataclass
class Galore64:
    """Zhao et al. 2024, algorithm 2, on given projections: ``projection`` is ``[r, I]`` (O >= I) or ``[O, r]``.

    The bias correction, eps and the order of the decay are those of the authors' package.
    """

    lr: float
    scale: float = 0.25
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    correct_bias: bool = True
    projection: Tensor | None = None

    def low(self, g: Tensor) -> Tensor:
        if self.projection is None:
            return g
        return g @ self.projection.t() if g.shape[0] >= g.shape[1] else self.projection.t() @ g

    def direction(self, state: dict, g: Tensor, n: Tensor, r: Tensor, t: int) -> Tensor:
        if self.projection is None:
            return n
        return self.scale * (n @ self.projection if g.shape[0] >= g.shape[1] else self.projection @ n)

    def step(self, w: Tensor, state: dict, g: Tensor, t: int) -> Tensor:
        r = self.low(g)
        m, v = moments(state, r, self.betas, r**2)
        step_size = self.lr * ((1 - self.betas[1] ** t) ** 0.5 / (1 - self.betas[0] ** t) if self.correct_bias else 1)
        w = w - step_size * self.direction(state, g, m / (v.sqrt() + self.eps), r, t)
        return w - self.lr * self.weight_decay * w


@dataclass
class Apollo64(Galore64):
    """Zhu et al. 2024, algorithm 1, with the norm-growth limiter of the authors' package."""

    scale: float = 1.0
    scale_type: str = "channel"

    def direction(self, state: dict, g: Tensor, n: Tensor, r: Tensor, t: int) -> Tensor:
        if self.projection is None:
            return n
        dim = (1 if g.shape[0] >= g.shape[1] else 0) if self.scale_type == "channel" else (0, 1)
        update = g * (n.norm(dim=dim, keepdim=True) / (r.norm(dim=dim, keepdim=True) + 1e-8))
        size = update.norm()
        if t > 1:
            limiter = max(size / (state["scaled_grad"] + 1e-8), torch.tensor(1.01)) / 1.01
            update, size = update / limiter, size / limiter
        state["scaled_grad"] = size
        return update * self.scale**0.5


class Optimizer64:
    """A hand-written rule as an optimizer over ``.grad``: weights and states in fp64, the parameters rounded.

    Args:
        params: stepped in place.
        make: ``make(index)``, the rule for the parameter of this place.
    """

    def __init__(self, params, make):
        self.params = list(params)
        self.state = {p: {} for p in self.params}
        self._make = make
        self._taken = 0
        self.take_weights()

    def take_weights(self) -> None:
        """Goes on from what the parameters are now."""
        self._weights = [p.detach().double() for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        self._taken += 1
        for index, p in enumerate(self.params):
            rule = self._make(index)
            self._weights[index] = rule.step(self._weights[index], self.state[p], p.grad.double(), self._taken)
            p.copy_(self._weights[index])

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None
