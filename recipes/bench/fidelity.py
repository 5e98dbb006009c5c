"""Twenty steps of one linear against fp32: the cost of a bf16 gradient and of the states' formats (FORGE, appendix E).

``python recipes/bench/fidelity.py --out FILE.json`` from the repository's root, at the paper's size on a GPU and a
sixteenth of it in each direction on a CPU. The weight is fp32 everywhere, so that nothing but gradient and states is
rounded; factors are bf16. The paper gives no learning rate: it is the one with which the first arm is as far from fp32
as the paper's. For Lion the first arm's is not known, and AdamW's learning rate is taken over.

========== =======================================================================================
standard   the gradient in bf16, torch's fused AdamW (Lion: by hand), states rounded to bf16 after it
step       the gradient in bf16, our elementwise step, bf16 states
fused      our fused gradient and step, bf16 states
int8, fp8  the same, 8-bit states
========== =======================================================================================
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from forge_megatron import kernels, rules  # noqa: E402
from forge_megatron.formats import scale_name, state_format  # noqa: E402
from launch.provenance import describe  # noqa: E402

#: ``[V, H]`` of the weight and tokens of a step, on a GPU and on a CPU.
SIZES = {"cuda": (1024, 4096, 2048), "cpu": (64, 256, 128)}
STEPS = 20
#: rms-rel(W) of the paper's arms.
PAPER = {"standard": 6.091e-4, "step": 6.096e-4, "fused": 5.825e-4, "int8": 2.588e-3, "fp8": 2.560e-2}
HYPERPARAMETERS = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "lion": {"betas": (0.9, 0.99), "weight_decay": 0.01},
}
WEIGHT_STD = 0.02


class Inputs:
    """The same weight and factors for every arm."""

    def __init__(self, device: str, seed: int = 0):
        self.rows, self.columns, self.tokens = SIZES[device]
        self.device, self.seed = device, seed

    def weight(self) -> Tensor:
        return WEIGHT_STD * self._random(0, self.rows, self.columns)

    def factors(self, step: int) -> tuple[Tensor, Tensor]:
        dy = self._random(2 * step, self.tokens, self.rows) / self.tokens**0.5
        return dy.bfloat16(), self._random(2 * step + 1, self.tokens, self.columns).bfloat16()

    def _random(self, index: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        return torch.randn(shape, generator=generator).to(self.device)


def torch_arm(rule: str, lr: float, inputs: Inputs, *, fp32: bool) -> Tensor:
    """torch's AdamW, or Lion by hand (Chen et al., algorithm 2); in fp32, or with gradient and states in bf16."""
    weight = torch.nn.Parameter(inputs.weight())
    group = HYPERPARAMETERS[rule]
    optimizer = torch.optim.AdamW([weight], lr=lr, fused=not fp32, **HYPERPARAMETERS["adamw"])
    momentum = torch.zeros_like(weight)
    for step in range(1, STEPS + 1):
        dy, x = inputs.factors(step)
        gradient = dy.float().t() @ x.float() if fp32 else (dy.t() @ x).float()
        if rule == "adamw":
            weight.grad = gradient
            optimizer.step()
            kept = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq")]
        else:
            beta1, beta2 = group["betas"]
            with torch.no_grad():
                update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
                weight.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
            momentum = beta2 * momentum + (1 - beta2) * gradient
            kept = [momentum]
        for state in () if fp32 else kept:
            state.copy_(state.bfloat16())
    return weight.detach()


def our_arm(rule: str, lr: float, inputs: Inputs, states: str, *, fused: bool) -> Tensor:
    """Our kernels with states of a format, fused, or from a gradient in bf16."""
    rule = rules.get(rule)
    group = rule.resolve({"lr": lr, **HYPERPARAMETERS[rule.name]})
    weight, state = inputs.weight(), {}
    for name in rule.states:
        state.update(state_format(states).allocate(name, weight, nonnegative=name in rule.nonnegative))
    slot = kernels.Slot(
        rule,
        weight,
        tuple(state[name] for name in rule.states),
        torch.empty(rule.n_scalars, device=weight.device),
        scales=tuple(state[scale_name(name)] for name in rule.states if scale_name(name) in state),
    )
    for step in range(1, STEPS + 1):
        slot.scalars.copy_(torch.tensor(rule.scalars(group, step)))
        dy, x = inputs.factors(step)
        if fused:
            kernels.wgrad_step(slot, [(dy, x)])
        else:
            kernels.step([slot], [dy.t() @ x])
    return weight


def arms(rule: str, lr: float, inputs: Inputs) -> dict[str, Callable[[], Tensor]]:
    return {
        "standard": lambda: torch_arm(rule, lr, inputs, fp32=False),
        "step": lambda: our_arm(rule, lr, inputs, "bf16", fused=False),
        "fused": lambda: our_arm(rule, lr, inputs, "bf16", fused=True),
        "int8": lambda: our_arm(rule, lr, inputs, "int8", fused=True),
        "fp8": lambda: our_arm(rule, lr, inputs, "fp8", fused=True),
    }


def distance(weight: Tensor, reference: Tensor) -> dict[str, float]:
    difference = weight.double() - reference.double()
    relative = difference.norm() / reference.double().norm()
    return {"rms_rel": relative.item(), "max_abs": difference.abs().max().item()}


def measure(rule: str, lr: float, inputs: Inputs) -> dict[str, dict[str, float]]:
    reference = torch_arm(rule, lr, inputs, fp32=True)
    return {name: distance(arm(), reference) for name, arm in arms(rule, lr, inputs).items()}


def learning_rate(inputs: Inputs) -> float:
    """With which the standard arm is as far from fp32 as the paper's: the distance is nearly proportional to it."""
    lr = 1e-3
    for _ in range(3):
        reference = torch_arm("adamw", lr, inputs, fp32=True)
        found = distance(torch_arm("adamw", lr, inputs, fp32=False), reference)["rms_rel"]
        lr *= PAPER["standard"] / found
    return lr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    inputs = Inputs(options.device)
    lr = learning_rate(inputs)
    found = {rule: measure(rule, lr, inputs) for rule in HYPERPARAMETERS}
    size = dict(zip(("V", "H", "tokens"), SIZES[options.device], strict=True))
    log = {**describe(), "size": size, "steps": STEPS, "lr": lr, "paper": PAPER, "rules": found}
    options.out.write_text(json.dumps(log, indent=1))
    for rule, results in found.items():
        for name, result in results.items():
            print(f"{rule:6} {name:9} rms-rel(W) {result['rms_rel']:.3e}  max |dW| {result['max_abs']:.3e}")


if __name__ == "__main__":
    main()
