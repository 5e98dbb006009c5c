"""Every rule under ``attach`` beside its reference, on gradients of whole numbers: the same to the last bit in both."""

from __future__ import annotations

import torch
from torch import nn

import forge_megatron as forge
from tests.cpu import oracles, test_attach_regimes

#: Rules of one coordinate; the others' are those of the tests of regimes.
FUSED = {rule: {"lr": 1e-2, "weight_decay": 0.1} for rule in oracles.OPTIMIZERS}
OPTIONS = {**FUSED, **test_attach_regimes.OPTIONS}

#: ``[O, I]`` of weights for the kernels of aligned rows, and of rows that are not.
SHAPES = ((128, 256), (192, 64), (33, 50))
STEPS = 6


class Sums(nn.Module):
    """Linears whose output gradients are given: their weight gradients do not depend on what was stepped before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)

    def forward(self, xs, dys):
        return sum((linear(x) * dy).sum() for linear, x, dy in zip(self.linears, xs, dys, strict=True))


def whole_numbers(step: int, p: torch.Tensor) -> tuple[list, list]:
    """Inputs and output gradients of a step, as ``p`` is: sums of their products are exact, in any order."""
    generator = torch.Generator().manual_seed(step)
    # Each step of another size, which with one size would cancel from ratios.
    sizes = [(columns, 1.0) for _, columns in SHAPES], [(rows, 2.0 ** (step % 3)) for rows, _ in SHAPES]
    return tuple(
        [scale * torch.randint(-3, 4, (48, n), generator=generator).to(p) for n, scale in side] for side in sizes
    )


def expect_the_references_steps(rule: str, device: str, recipe: str | None = None, **options) -> None:
    """Trains both ``STEPS`` steps and compares every weight; with ``recipe="fp32-master"`` bf16 weights' masters."""
    model = Sums().to(device, torch.float32 if recipe is None else torch.bfloat16)
    twin = Sums().to(device)
    twin.load_state_dict(model.state_dict())
    before = [p.detach().clone() for p in twin.parameters()]
    optimizer = forge.attach(model, rule, recipe=recipe, **OPTIONS[rule], **options)
    if rule in FUSED:
        reference = oracles.OPTIMIZERS[rule](twin.parameters(), **OPTIONS[rule])
    else:
        reference = test_attach_regimes.reference(rule, twin, optimizer)
    for step in range(STEPS):
        model(*whole_numbers(step, model.linears[0].weight)).backward()
        assert all(linear.weight.grad is None for linear in model.linears)
        optimizer.step()
        optimizer.zero_grad()
        # After ours, whose projections it takes.
        twin(*whole_numbers(step, before[0])).backward()
        reference.step()
        reference.zero_grad()
    for (name, p), q, start in zip(model.named_parameters(), twin.parameters(), before, strict=True):
        ours = optimizer.state[p].get("master", p).detach()
        assert torch.equal(ours.to(p.dtype), p), name
        assert (q - start).abs().max() > 1e-3, name
        if rule in test_attach_regimes.NEWTON_SCHULZ and p.dim() == 2:
            # Two products of bf16 in another order round an entry to another side.
            largest = 1e-2 * 1.5 * max(1.0, p.shape[0] / p.shape[1]) ** 0.5
            torch.testing.assert_close(
                ours, q.detach(), rtol=0, atol=STEPS * largest * 4 * torch.finfo(torch.bfloat16).eps
            )
        else:
            # A norm over a layer is summed in another order: its square root's length of roundings.
            oracles.assert_rounding(ours, q.detach(), 16 + p.numel() ** 0.5 / 8)
