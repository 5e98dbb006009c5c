"""The same model twice, one attached and one stepped by ``torch.optim``, and what must stay equal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import forge_megatron as forge
from forge_megatron import rules
from forge_megatron.formats import in_memory
from forge_megatron.formats.code import as_bytes
from tests.cpu import oracles

#: Every behaviour is shown on the torch reference and on the Triton kernels (interpreted without a GPU).
backends = pytest.mark.parametrize("backend", ["reference", "triton"])


def mlp(*widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linears of the given widths with a tanh between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_square(x: Tensor) -> Callable[[nn.Module], Tensor]:
    """The loss of most tests."""
    return lambda model: model(x).square().mean()


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Each parameter's states, in the order of the groups; empty where none exists."""
    return [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of every weight, buffer and optimizer state."""
    tensors = [*model.state_dict().values()]
    tensors += [tensor for state in states(optimizer) for tensor in state.values()]
    return [tensor.detach().clone() for tensor in tensors]


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """As :func:`snapshot`, of what lies in memory: e4m3 as bytes, which torch compares."""
    return [as_bytes(part) for tensor in snapshot(model, optimizer) for part in in_memory(tensor)]


def expect_bit_equal(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after)
    for index, (a, b) in enumerate(zip(before, after, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {index} changed by {(a.double() - b.double()).abs().max()}"


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise ArithmeticError("on purpose")


class Pair:
    """A model that is attached, and its twin under ``torch.optim``.

    Args:
        model: attached.
        twin: a model with equal weights; default: a copy that is made before attach.
        clip: largest norm, ours by ``clip_grad_norm`` and the twin's by ``clip_grad_norm_``.
        options: of ``attach``.
    """

    def __init__(self, model: nn.Module, *, twin=None, lr: float = 1e-3, clip=None, rule: str = "adamw", **options):
        self.model = model
        self.twin = copy.deepcopy(model) if twin is None else twin
        hyperparameters = {key: options.pop(key) for key in rules.get(rule).defaults if key in options}
        self.optimizer = forge.attach(model, rule, lr=lr, clip_grad_norm=clip, **hyperparameters, **options)
        self.oracle = oracles.OPTIMIZERS[rule](self.twin.parameters(), lr=lr, **hyperparameters)
        self.clip = clip
        self.twin_norm: Tensor | None = None

    def sides(self):
        return (self.model, self.optimizer), (self.twin, self.oracle)

    def backward(self, loss: Callable[[nn.Module], Tensor]) -> None:
        for model, _ in self.sides():
            loss(model).backward()

    def close(self) -> None:
        """Clips and steps both, and zeroes their gradients."""
        if self.clip is not None:
            self.twin_norm = nn.utils.clip_grad_norm_(self.twin.parameters(), self.clip)
        for _, optimizer in self.sides():
            optimizer.step()
            optimizer.zero_grad()

    def train(self, *losses: Callable[[nn.Module], Tensor]) -> None:
        """One step a loss."""
        for loss in losses:
            self.backward(loss)
            self.close()

    def expect_equal(self, atol: float = 1e-6) -> None:
        """Weights and states agree, and step counts exactly."""
        for (name, ours), theirs in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
            state, expected = self.optimizer.state.get(ours, {}), self.oracle.state.get(theirs, {})
            # torch creates states at the first step, attach at once; torch's SGD counts no steps.
            if not isinstance(self.oracle, torch.optim.SGD) and ("step" in expected or not expected):
                assert float(state.get("step", 0)) == float(expected.get("step", 0)), name
            for key in expected:
                if key != "step":
                    where = f"{name} {key}"
                    bound = atol * max([1.0, *expected[key].abs().flatten().tolist()])
                    torch.testing.assert_close(
                        state[key], expected[key], rtol=0, atol=bound, msg=lambda m, where=where: f"{where}: {m}"
                    )
