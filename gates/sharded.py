"""A small model sharded by ``fully_shard`` with FORGE, and whole with torch alone: what F1, F2, F3 and MW compare.

The reference is one process that has every rank's sequences, ``torch.optim.AdamW`` and, for 16-bit weights, fp32 master
copies by hand. It shares the model with what it judges, and no code of FORGE or FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import forge_megatron as forge
from gates.gate import Case, Reading
from gates.pair import ADAMW, STATES, STEPS, Run, device_of, relative_rms, weights_of

# Rows that no number of ranks divides, and a vector with fewer rows than there are ranks.
VOCAB, WIDTH, INNER, SHORT = 30, 16, 37, 3
SEQUENCES, TOKENS = 2, 8
MASTERS, MIXED = "16-bit weights with masters", "16-bit copies of fp32 weights"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        micro_batches: a step; one is stepped on arrival unless ``clip`` is given.
        clip: largest global norm.
        precision: ``""`` for fp32, ``MASTERS`` or ``MIXED``.
        replicas: of the shards (the first dimension of the mesh).
        reshard: ``fully_shard``'s ``reshard_after_forward``.
        evaluate: a forward without gradients between backward and ``step()``.
    """

    micro_batches: int = 1
    clip: float | None = None
    precision: str = ""
    replicas: int = 1
    reshard: bool = True
    evaluate: bool = False


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Model(nn.Module):
    """Equal on every rank."""

    def __init__(self, case: Case):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.embedding = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.scale = nn.Parameter(torch.full((SHORT,), 0.5))
            self.head = nn.Linear(WIDTH, VOCAB)
        self.to(device_of(case))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) * self.scale.sum()
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def tokens_of(case: Case, step: int, micro_batch: int, rank: int) -> Tensor:
    """``[sequences, tokens + 1]`` of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randint(VOCAB, (SEQUENCES, TOKENS + 1), generator=generator).to(device_of(case))


def loss_of(model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def sharded(case: Case, arm: Arm) -> tuple[nn.Module, forge.ForgeOptimizer]:
    """The model under ``fully_shard``, a block by itself and the rest together, and attached."""
    shape, names = (arm.replicas, case.degrees.dp // arm.replicas), ("replica", "shard")
    mesh = init_device_mesh(case.device, shape, mesh_dim_names=names)
    mesh = mesh if arm.replicas > 1 else mesh["shard"]
    model = Model(case)
    options = {"mesh": mesh, "reshard_after_forward": arm.reshard}
    if arm.precision:
        param_dtype = torch.bfloat16 if arm.precision == MIXED else None
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    if arm.precision == MASTERS:
        model.bfloat16()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    recipe = "fp32-master" if arm.precision == MASTERS else None
    waits = {"accumulation_steps": arm.micro_batches, "clip_grad_norm": arm.clip}
    return model, forge.attach(model, "adamw", recipe=recipe, **waits, **ADAMW)


def steps(case: Case, arm: Arm, model: nn.Module, optimizer: forge.ForgeOptimizer) -> Iterator[float]:
    """Trains, and yields the mean loss of all ranks after each step."""
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64, device=device_of(case))
        for micro_batch in range(arm.micro_batches):
            loss = loss_of(model, tokens_of(case, step, micro_batch, dist.get_rank())) / arm.micro_batches
            loss.backward()
            total += loss.detach()
        if arm.evaluate:
            with torch.no_grad():
                loss_of(model, tokens_of(case, step, 99, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        yield (total / case.degrees.dp).item()


def parallel(case: Case, arm: Arm) -> Run:
    """FORGE on the shards; whole tensors of every parameter."""
    model, optimizer = sharded(case, arm)
    losses = list(steps(case, arm, model, optimizer))
    named = dict(model.named_parameters())
    weights = {name: p.detach().full_tensor() for name, p in named.items()}
    states = {name: tuple(optimizer.state[p][s].full_tensor() for s in STATES) for name, p in named.items()}
    return Run(weights, states, losses)


def alone(case: Case, arm: Arm) -> Run:
    """The reference: every rank's sequences in this process.

    In fp32 they are one batch. In 16 bits each rank's part is summed up in fp32 after its own backward: the products
    of bf16 matrices of another shape are rounded in another order, by more than the bounds.
    """
    model = Model(case)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    if arm.precision == MASTERS:
        masters = {name: nn.Parameter(p.detach().bfloat16().float()) for name, p in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), foreach=False, **ADAMW)
    losses = []
    for step in range(STEPS):
        total, gradients = 0.0, {name: torch.zeros_like(p) for name, p in masters.items()}
        for micro_batch in range(arm.micro_batches):
            parts = [tokens_of(case, step, micro_batch, rank) for rank in range(case.degrees.dp)]
            for part in parts if arm.precision else [torch.cat(parts)]:
                dtype = torch.bfloat16 if arm.precision else torch.float32
                weights = {name: p.detach().to(dtype).requires_grad_() for name, p in masters.items()}
                loss = loss_of(lambda x, w=weights: torch.func.functional_call(model, w, (x,)), part)
                (loss / arm.micro_batches).backward()
                share = arm.micro_batches * (case.degrees.dp if arm.precision else 1)
                total += loss.item() / share
                for name, weight in weights.items():
                    gradients[name] += weight.grad.float()
        for name, master in masters.items():
            master.grad = gradients[name] / case.degrees.dp if arm.precision else gradients[name]
            if arm.precision == MASTERS:
                # FSDP2 hands the reduced gradient over in the parameter's dtype.
                master.grad = master.grad.bfloat16().float()
        if arm.clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), arm.clip)
        optimizer.step()
        losses.append(total)
    dtype = torch.bfloat16 if arm.precision == MASTERS else torch.float32
    states = {name: tuple(optimizer.state[p][s] for s in STATES) for name, p in masters.items()}
    return Run({name: p.detach().to(dtype) for name, p in masters.items()}, states, losses)


def loss_of_weights(case: Case, run: Run) -> float:
    """Of the weights after the last step, in their own dtype, on sequences that no step has seen."""
    model, tokens = Model(case), torch.cat([tokens_of(case, STEPS, 0, rank) for rank in range(case.degrees.dp)])
    with torch.no_grad():
        return loss_of(lambda x: torch.func.functional_call(model, run.weights, (x,)), tokens).item()


def loss_gap(ours: Run, reference: Run) -> float:
    """The largest difference of the losses of a step; NaN stays."""
    gaps = [a - b for a, b in zip(ours.losses, reference.losses, strict=True)]
    return torch.tensor(gaps, dtype=torch.float64).abs().max().item()


def worst_state_gap(ours: Run, reference: Run) -> float:
    """The largest relative RMS difference of a state; NaN stays."""
    gaps = [
        relative_rms([ours.states[name][i]], [pair[i]]) for name, pair in reference.states.items() for i in range(2)
    ]
    return torch.tensor(gaps).max().item()


def gaps(
    how: str, ours: Run, reference: Run, *, losses: float, states: float, weights: float | None = None
) -> list[Reading]:
    """The readings of a run against the reference, with a bound for each kind; no bound of weights: not compared."""
    readings = [Reading(f"loss gap, {how}", loss_gap(ours, reference), losses)]
    if weights is not None:
        gap = relative_rms([ours.weights[name] for name in reference.weights], weights_of(reference))
        readings.append(Reading(f"ΔW, {how}", gap, weights))
    return [*readings, Reading(f"Δstate, {how}", worst_state_gap(ours, reference), states)]
