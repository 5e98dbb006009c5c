"""What the code is judged against: torch.optim, or fp64 written by hand. Nothing of forge_megatron is used here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

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


class Lion(torch.optim.Optimizer):
    """Program 1 of Symbolic Discovery of Optimization Algorithms, by hand, in the parameters' dtype."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False, foreach=None):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                state["step"] = state.get("step", torch.zeros(())) + 1
                update = torch.sign(beta1 * m + (1 - beta1) * g)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * g)


class Torch64:
    """An optimizer of torch.optim in fp64, one step at a time, from given states.

    Args:
        optimizer: its class.
        hyperparameters: its arguments.
    """

    def __init__(self, optimizer: type[torch.optim.Optimizer], **hyperparameters):
        self._make = partial(optimizer, foreach=False, **hyperparameters)
        self.states = tuple(
            name for name, value in self._after(torch.ones(1), {}, torch.ones(1))[1].items() if value.dim()
        )

    def _after(self, w: Tensor, state: dict, g: Tensor) -> tuple[Tensor, dict]:
        parameter = torch.nn.Parameter(w.clone())
        optimizer = self._make([parameter])
        if state:
            optimizer.state[parameter] = state
        parameter.grad = g
        optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    def step(self, w: Tensor, states: tuple[Tensor, ...], g: Tensor, t: int):
        """Step ``t``, from 1: before the first, torch has no states, or makes them itself."""
        state = {}
        if t > 1:
            state = {name: value.double().clone() for name, value in zip(self.states, states, strict=True)}
            state["step"] = torch.tensor(t - 1.0)
            state["mu_product"] = self._mu_product(t - 1)
        w, state = self._after(w.double(), state, g.double())
        return w, tuple(state[name] for name in self.states)

    def _mu_product(self, steps: int) -> Tensor:
        """NAdam's, by its definition."""
        group = self._make([torch.nn.Parameter(torch.zeros(1))]).defaults
        beta1, decay = group.get("betas", (0.0,))[0], group.get("momentum_decay", 0.0)
        factors = [beta1 * (1 - 0.5 * 0.96 ** (t * decay)) for t in range(1, steps + 1)]
        return torch.tensor(math.prod(factors), dtype=torch.float64)


TORCH = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
#: torch.optim's, and by hand what it does not have.
OPTIMIZERS = {**TORCH, "lion": Lion}
ORACLES = {name: partial(Torch64, optimizer) for name, optimizer in OPTIMIZERS.items()}
ORACLES.update(adamw=AdamW64, sgd=SGD64)

#: Each rule of regime 1 in each of its forms: the set of states, or another formula.
FORMS = {
    "adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "adam": {},
    "adam-amsgrad": {"amsgrad": True},
    "adamax": {},
    "adamw": {},
    "adamw-amsgrad": {"amsgrad": True},
    "lion": {},
    "momentum": {"dampening": 0.3},
    "momentum-nesterov": {"nesterov": True},
    "nadam": {},
    "nadam-decoupled": {"decoupled_weight_decay": True},
    "radam": {},
    "radam-decoupled": {"decoupled_weight_decay": True},
    "rmsprop": {},
    "rmsprop-centered": {"centered": True},
    "rmsprop-momentum": {"momentum": 0.9},
    "rmsprop-both": {"centered": True, "momentum": 0.9},
    "sgd": {},
}


def oracle(form: str, **hyperparameters):
    """The fp64 oracle of one of ``FORMS``, with further hyperparameters."""
    name = form.partition("-")[0]
    # Those by hand know the plain form.
    make = partial(Torch64, OPTIMIZERS[name]) if FORMS[form] else ORACLES[name]
    return make(**{**FORMS[form], **hyperparameters})
