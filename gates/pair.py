"""Column→row pairs, tensor-parallel with FORGE and dense with torch alone: what TP and SP1 compare.

The model is two blocks of ``h + row(gelu(column(h)))``. The first block's gradients go through the second's column
linear, so a skipped reduction of an input gradient reaches a weight. The reference uses ``torch.nn.functional`` and
``torch.optim.AdamW`` and shares no code with what it judges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn

from forge_megatron import ForgeOptimizer
from forge_megatron.megatron.layers import ForgeColumnParallelLinear, ForgeRowParallelLinear
from gates.gate import Case

STEPS = 5
BLOCKS = 2
TOKENS_PER_RANK, BATCH = 6, 2
HIDDEN, FFN = 48, 96
# eps is a tenth of a typical gradient: the update then depends on the gradient's scale, which Adam hides otherwise, and
# the rounding of a gradient near zero is not blown up to a whole lr.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATES = ("exp_avg", "exp_avg_sq")


@dataclass
class Run:
    """What a training run left: whole or sharded tensors by parameter name.

    Attributes:
        weights: name -> parameter, or this rank's shard of it.
        states: name -> (exp_avg, exp_avg_sq), shaped as the parameter.
        losses: one a step.
    """

    weights: dict[str, Tensor]
    states: dict[str, tuple[Tensor, Tensor]]
    losses: list[float] = field(default_factory=list)


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if case.device == "cuda" else torch.device("cpu")


def sizes(case: Case) -> tuple[int, int, int]:
    """(sequence, hidden, ffn): multiples of the degree, and odd numbers of tiles."""
    return TOKENS_PER_RANK * case.degrees.tp, HIDDEN, FFN * case.degrees.tp


def initial(case: Case) -> dict[str, Tensor]:
    """Dense fp32 parameters, equal on every rank, rounded to the case's dtype."""
    _, hidden, ffn = sizes(case)
    generator = torch.Generator().manual_seed(7)
    parameters = {}
    for block in range(BLOCKS):
        for name, (rows, columns) in {"column": (ffn, hidden), "row": (hidden, ffn)}.items():
            weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
            parameters[f"{block}.{name}.weight"] = weight
            parameters[f"{block}.{name}.bias"] = torch.randn(rows, generator=generator) * 0.1
    return {name: p.to(DTYPES[case.dtype]).float().to(device_of(case)) for name, p in parameters.items()}


def batches(case: Case, count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets ``[s, b, h]``, new ones for each of the micro-batches, equal on every rank."""
    sequence, hidden, _ = sizes(case)
    generator = torch.Generator().manual_seed(11)
    shape = (sequence, BATCH, hidden)
    pairs = [(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) for _ in range(count)]
    return [tuple(t.to(device_of(case), DTYPES[case.dtype]) for t in pair) for pair in pairs]


def dense(case: Case, micro_batches: int) -> Run:
    """The reference: whole weights on every rank, an fp32 master copy, torch.optim.AdamW."""
    masters = {name: nn.Parameter(p.clone()) for name, p in initial(case).items()}
    optimizer = torch.optim.AdamW(masters.values(), foreach=False, **ADAMW)
    losses = []
    data = iter(batches(case, STEPS * micro_batches))
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro_batches):
            x, target = next(data)
            w = {name: master.to(x.dtype) for name, master in masters.items()}
            h = x
            for b in range(BLOCKS):
                a = F.gelu(F.linear(h, w[f"{b}.column.weight"], w[f"{b}.column.bias"]))
                h = h + (F.linear(a, w[f"{b}.row.weight"]) + w[f"{b}.row.bias"])
            loss = F.mse_loss(h.float(), target.float()) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    weights = {name: master.detach().to(DTYPES[case.dtype]) for name, master in masters.items()}
    states = {name: tuple(optimizer.state[m][s] for s in STATES) for name, m in masters.items()}
    return Run(weights, states, losses)


class Pairs(nn.Module):
    """The blocks with FORGE's linears; the sequence is sharded between pairs under sequence parallelism."""

    def __init__(self, case: Case):
        super().__init__()
        _, hidden, ffn = sizes(case)
        config = ModelParallelConfig(
            params_dtype=DTYPES[case.dtype],
            tensor_model_parallel_size=case.degrees.tp,
            sequence_parallel=case.sp,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        common = {"config": config, "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False}
        self.blocks = nn.ModuleList()
        for _ in range(BLOCKS):
            column = ForgeColumnParallelLinear(hidden, ffn, gather_output=False, **common)
            row = ForgeRowParallelLinear(ffn, hidden, input_is_parallel=True, **common)
            self.blocks.append(nn.ModuleDict({"column": column, "row": row}))
        self.to(device_of(case))
        for name, whole in initial(case).items():
            parameter = self.get_parameter(f"blocks.{name}")
            parameter.data.copy_(shard(case, name, whole))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block["row"](F.gelu(block["column"](h)[0]))[0]
        return h


def shard(case: Case, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a dense tensor: rows of the column linear, columns of the row linear's weight."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    if ".column." in name:
        return whole.chunk(case.degrees.tp, dim=0)[rank]
    return whole if name.endswith("bias") else whole.chunk(case.degrees.tp, dim=1)[rank]


def parallel(case: Case, micro_batches: int) -> Run:
    """FORGE: one micro-batch a step is stepped inside backward, several wait for ``step()``."""
    model = Pairs(case)
    named = {name.removeprefix("blocks."): p for name, p in model.named_parameters()}
    optimizer = ForgeOptimizer(
        list(named.values()), "adamw", recipe="fp32-master", accumulation_steps=micro_batches, **ADAMW
    )
    for name, parameter in named.items():
        if name.endswith("weight"):
            optimizer.own(parameter, name=name)
    group = parallel_state.get_tensor_model_parallel_group()
    losses = []
    data = iter(batches(case, STEPS * micro_batches))
    for _ in range(STEPS):
        total = 0.0
        for _ in range(micro_batches):
            x, target = (_local(case, t) for t in next(data))
            loss = F.mse_loss(model(x).float(), target.float()) / micro_batches
            loss = loss / case.degrees.tp if case.sp else loss
            loss.backward()
            total += _whole_loss(case, loss, group)
        if case.sp:
            # Megatron's finalize_model_grads does this for every parameter marked sequence_parallel.
            for parameter in named.values():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    states = {name: tuple(optimizer.state[p][s] for s in STATES) for name, p in named.items()}
    return Run({name: p.detach() for name, p in named.items()}, states, losses)


def _local(case: Case, whole: Tensor) -> Tensor:
    """This rank's tokens of ``[s, b, h]``."""
    return whole.chunk(case.degrees.tp)[parallel_state.get_tensor_model_parallel_rank()] if case.sp else whole


def _whole_loss(case: Case, loss: Tensor, group: dist.ProcessGroup) -> float:
    whole = loss.detach().clone()
    if case.sp:
        dist.all_reduce(whole, group=group)
    return whole.item()


def shards(case: Case, run: Run) -> Run:
    """This rank's part of a dense run."""
    weights = {name: shard(case, name, weight) for name, weight in run.weights.items()}
    states = {name: tuple(shard(case, name, s) for s in pair) for name, pair in run.states.items()}
    return Run(weights, states, run.losses)


def weights_of(run: Run) -> list[Tensor]:
    return list(run.weights.values())


def states_of(run: Run) -> list[Tensor]:
    return [state for pair in run.states.values() for state in pair]


def relative_rms(ours: list[Tensor], reference: list[Tensor]) -> float:
    """``rms(ours - reference) / rms(reference)`` over all the tensors' elements together; NaN stays."""
    a, b = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (ours, reference))
    return ((a - b).norm() / b.norm()).item()


def worst_relative_rms(ours: list[Tensor], reference: list[Tensor]) -> float:
    """The largest ``relative_rms`` of a pair of tensors, for tensors of different magnitudes; NaN stays."""
    ratios = [relative_rms([a], [b]) for a, b in zip(ours, reference, strict=True)]
    return torch.tensor(ratios).max().item()


def drift(tensors: list[Tensor]) -> float:
    """Largest difference of these tensors between the ranks of the tensor-parallel group; NaN stays."""
    group = parallel_state.get_tensor_model_parallel_group()
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    copies = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(copies, flat, group=group)
    return (torch.stack(copies) - flat).abs().max().item()
