"""EP1: a Megatron GPT, experts over ranks with FORGE, against all experts on one rank with Megatron's optimizer.

Each rank of the expert-parallel run has its own micro-batches; in the reference every rank takes all of them, as one
process would. No token ever comes to one of the experts, which still decays. Three runs: in backward, experts as
weights of their own and in one tensor, and waiting, with two micro-batches and clipping in force at every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gates.gate import Case, Degrees, Gate, Reading

if TYPE_CHECKING:
    import torch

    from launch.config import Recipe

STEPS = 8
SEQUENCE, BATCH = 32, 2
STARVED = 1
# The loss's bound is the paper's. Norms and states catch what Adam hides from the loss, a constant factor on the
# gradient; their sums are over the same tokens in another order.
LOSS, NORM, STATES = 4.9e-5, 2.0**-20, 2.0**-18
# A rounding of the weight a step.
DECAY = STEPS * 2.0**-24


def recipe(case: Case, micro_batches: int, *, all_local: bool, grouped: bool = False) -> Recipe:
    from launch import config

    ranks = case.degrees.ep
    mine = micro_batches * (ranks if all_local else 1)
    return config.Recipe(
        model=config.Model(
            num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=128, dtype=case.dtype,
            num_experts=2 * ranks, expert_topk=1, expert_grouped=grouped,
        ),
        parallel=config.Parallel(data=ranks, expert=1 if all_local else ranks),
        data=config.Data(sequence_length=SEQUENCE),
        batch=config.Batch(micro=BATCH, total=BATCH * ranks * mine),
        optimizer=config.Optimizer(
            use_forge=not all_local, lr=5e-3, warmup_steps=2, clip_grad=0.1 if micro_batches > 1 else 0.0,
        ),
        run=config.Run(dir="", steps=STEPS, device=case.device),
    )  # fmt: skip


def batches(recipe: Recipe, rank: int, device) -> Iterator[dict[str, torch.Tensor]]:
    """Those of one rank, or of all where it takes all of them, step by step."""
    import torch

    generator = torch.Generator().manual_seed(5)
    ranks, mine = recipe.parallel.data, recipe.micro_batches
    alone = recipe.parallel.expert == 1
    shape = (recipe.batch.micro, SEQUENCE)
    for _ in range(STEPS):
        for number in range(mine if alone else mine * ranks):
            tokens, labels = (torch.randint(recipe.model.vocab_size, shape, generator=generator) for _ in range(2))
            positions = torch.arange(SEQUENCE).expand(shape)
            batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": torch.ones(shape)}
            if alone or number // mine == rank:
                yield {name: tensor.to(device) for name, tensor in batch.items()}


def starve(model) -> None:
    """The mean of the others' scores is never the largest, and routers that are not trained keep it so."""
    for layer in model.decoder.layers:
        rows = layer.mlp.router.weight.requires_grad_(False)
        rows[STARVED] = 0.0
        rows[STARVED] = rows.sum(0) / (len(rows) - 1)


def by_expert(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Those of experts in one tensor by the names of SequentialMLP's; others as they are."""
    numbers = re.search(r"\.(\d+)-\d+\.", name)
    if numbers is None:
        return {name: tuple(tensors)}
    experts = enumerate(zip(*tensors, strict=True), int(numbers[1]))
    return {name.replace(numbers[0], f".local_experts.{number}."): each for number, each in experts}


def train(recipe: Recipe):
    """Train for STEPS.

    Returns:
        losses over all ranks and gradient norms, one a step; name to (exp_avg, exp_avg_sq); name to the weight of a
        starved expert and to what decay alone would have left of it.
    """
    import torch
    from megatron.core import parallel_state

    from forge_megatron.megatron.conversion import global_names
    from gates.mg import expect_the_path, states
    from launch import step
    from launch.model import build_chunks
    from launch.optim import build_schedule, wrap_and_optimize

    device = torch.device(recipe.run.device, torch.cuda.current_device() if recipe.run.device == "cuda" else None)
    torch.manual_seed(1)
    (model,) = build_chunks(recipe, recipe.model.vocab_size, device)
    starve(model)
    known = global_names(model)
    starved = {
        name: (p, weight)
        for n, p in model.named_parameters()
        for name, (weight,) in by_expert(known[n], [p.detach()]).items()
        if f".local_experts.{STARVED}." in name
    }
    decayed = {name: weight.double() for name, (_, weight) in starved.items()}
    chunks, optimizer = wrap_and_optimize(recipe, [model])
    scheduler = build_schedule(recipe, optimizer)
    step.connect(chunks, optimizer)
    expect_the_path(recipe, optimizer)
    data = batches(recipe, parallel_state.get_data_parallel_rank(), device)
    losses, norms = [], []
    for _ in range(STEPS):
        scheduler.step(1)
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        loss, _ = step.reduce(step.run(recipe, chunks, data, recipe.micro_batches), False)
        _, norm, _ = optimizer.step()
        losses.append(loss)
        norms.append(norm)
        for group in optimizer.param_groups:
            for name in [n for n, (p, _) in starved.items() if any(p is other for other in group["params"])]:
                decayed[name] *= 1.0 - group["lr"] * group["weight_decay"]
    kept = {}
    for name, state in states(model, optimizer).items():
        kept |= by_expert(known[name], state)
    return losses, norms, kept, {name: (weight.double(), decayed[name]) for name, (_, weight) in starved.items()}


def measure(case: Case) -> list[Reading]:
    from gates.layout import instead_of
    from gates.pair import worst_relative_rms

    readings, references = [], {}
    with instead_of(case.degrees, Degrees(dp=case.degrees.dp)):
        for micro_batches in (1, 2):
            references[micro_batches] = train(recipe(case, micro_batches, all_local=True))
    for micro_batches, grouped, how in ((1, False, "in backward"), (1, True, "in one tensor"), (2, False, "waiting")):
        losses, norms, reference, _ = references[micro_batches]
        our_losses, our_norms, ours, starved = train(recipe(case, micro_batches, all_local=False, grouped=grouped))
        moments = [state for name in starved for state in ours.pop(name)]
        pairs = [(a, b) for name in ours for a, b in zip(ours[name], reference[name], strict=True)]
        left = [((weight - decay).abs().max() / decay.abs().max()).item() for weight, decay in starved.values()]
        readings += [
            Reading(f"loss gap, {how}", max(abs(a - b) for a, b in zip(our_losses, losses, strict=True)), LOSS),
            Reading(f"norm gap, {how}", max(abs(a / b - 1) for a, b in zip(our_norms, norms, strict=True)), NORM),
            Reading(f"Δstate, {how}", worst_relative_rms([a for a, _ in pairs], [b for _, b in pairs]), STATES),
            Reading(f"starved expert: moments, {how}", max((m.abs().max().item() for m in moments), default=0.0), 0.0),
            Reading(f"starved expert: weight less its decay, {how}", max(left, default=0.0), DECAY),
        ]
    return readings


GATE = Gate(
    id="EP1",
    compares=f"a Megatron GPT, its experts over ranks, against all of them on one; one has no tokens, {STEPS} steps",
    least=2,
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
    axis="ep",
)
