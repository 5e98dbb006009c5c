"""Moving averages of a large share of the new gradient: torch.lerp then starts from its other end, and rounds so."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get
from tests.cpu import oracles

SHAPE = (33, 48)
RULES = {
    "adam": ("exp_avg", {}),
    "adamw": ("exp_avg", {}),
    "nadam": ("exp_avg", {}),
    "radam": ("exp_avg", {}),
    "adamax": ("exp_avg", {}),
    "rmsprop": ("grad_avg", {"centered": True}),
    "muon": ("momentum_buffer", {}),
}
OPTIMIZERS = {**oracles.TORCH, "muon": torch.optim.Muon}


@triton.jit
def fma_kernel(out, a, c):
    tl.store(out, tl.fma(tl.load(a), tl.load(a), tl.load(c)))


@functools.cache
def interpreter_fuses() -> bool:
    """Whether this Triton's interpreter rounds a multiplication and addition once, as a GPU does."""
    out, a, c = torch.ones(1), torch.tensor([1 + 2.0**-12]), torch.tensor([-1 - 2.0**-11])
    fma_kernel[(1,)](out, a, c)
    return out.item() == 2.0**-24


def shares(name: str, beta: float) -> dict:
    """``beta`` is what is left of the old average."""
    key = {"muon": "momentum", "rmsprop": "alpha"}.get(name, "betas")
    return {key: (beta, 0.4) if key == "betas" else beta}


def by_factors(slot: Slot, grad: torch.Tensor, backend: str) -> None:
    """From factors whose product is the gradient to the bit."""
    wgrad_step(slot, [(torch.eye(SHAPE[0]), grad)], backend=backend)


def in_memory(slot: Slot, grad: torch.Tensor, backend: str) -> None:
    step([slot], [grad], backend=backend)


@pytest.mark.parametrize("take", [by_factors, in_memory])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("beta", [0.9, 0.5, 0.3, 0.0])
@pytest.mark.parametrize("name", RULES)
def test_the_average_has_the_bits_of_torch(name, beta, backend, take):
    state, options = RULES[name]
    options = {**options, **shares(name, beta)}
    group = get(name).resolve({"lr": 1e-2, **options})
    rule = get(name).variant(group)
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
    states = tuple(torch.zeros(SHAPE) for _ in rule.states)
    slot = Slot(rule, parameter.detach().clone(), states, torch.empty(rule.n_scalars))
    running = tuple(rule.running.values())
    theirs = OPTIMIZERS[name]([parameter], lr=1e-2, **options)
    for count in range(1, 5):
        grad = torch.randn(SHAPE, generator=generator)
        slot.scalars.copy_(torch.tensor(rule.scalars(group, count, *running)))
        running = rule.advance(group, count, *running) if rule.advance else running
        take(slot, grad, backend)
        # Weight decay reaches the gradient of none of them, so the weights' own rounding does not.
        parameter.grad = grad
        theirs.step()
        ours, wanted = states[rule.states.index(state)], theirs.state[parameter][state]
        if backend == "triton" and not interpreter_fuses():
            # A product is rounded before it is added, in each of the steps so far.
            torch.testing.assert_close(ours, wanted, rtol=count * 2.0**-23, atol=count * 2.0**-23)
        else:
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize("momentum", [0.95, 0.5, 0.3, 0.0])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muons_weight_is_torchs_to_one_rounding(nesterov, momentum):
    """Its Newton-Schulz rounds its input to bf16, where one rounding of fp32 more decides between two neighbours."""
    options = {"lr": 1e-2, "momentum": momentum, "nesterov": nesterov}
    rule = get("muon").variant(get("muon").resolve(options))
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(SHAPE, generator=generator))
    scalars = torch.tensor(rule.scalars(get("muon").resolve(options), 1))
    slot = Slot(rule, parameter.detach().clone(), (torch.zeros(SHAPE),), scalars)
    theirs = torch.optim.Muon([parameter], **options)
    for _ in range(4):
        parameter.grad = torch.randn(SHAPE, generator=generator)
        step([slot], [parameter.grad], backend="reference")
        theirs.step()
        oracles.assert_rounding(slot.weight, parameter.detach(), 1)
