"""EP1: a Megatron GPT, experts over ranks with FORGE, against all experts on one rank with Megatron's optimizer.

Each rank of the expert-parallel run has its own micro-batches; in the reference every rank takes all of them, as one
process would. No token ever comes to one of the experts, which still decays. Two runs: in backward, and waiting, with
two micro-batches and clipping in force at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def recipe(case: Case, micro_batches: int, *, all_local: bool) -> Recipe:
    from launch import config

    ranks = case.degrees.ep
    mine = micro_batches * (ranks if all_local else 1)
    return config.Recipe(
        model=config.Model(
            num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=128, dtype=case.dtype,
            num_experts=2 * ranks, expert_topk=1,
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
    starved = {known[n]: p for n, p in model.named_parameters() if f".local_experts.{STARVED}." in known[n]}
    decayed = {name: p.detach().double() for name, p in starved.items()}
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
            for name in [name for name, p in starved.items() if any(p is other for other in group["params"])]:
                decayed[name] *= 1.0 - group["lr"] * group["weight_decay"]
    kept = {known[name]: state for name, state in states(model, optimizer).items()}
    return losses, norms, kept, {name: (p.detach().double(), decayed[name]) for name, p in starved.items()}


def measure(case: Case) -> list[Reading]:
    from gates.layout import instead_of
    from gates.pair import worst_relative_rms

    readings = []
    for micro_batches, how in ((1, "in backward"), (2, "waiting")):
        with instead_of(case.degrees, Degrees(dp=case.degrees.dp)):
            losses, norms, reference, _ = train(recipe(case, micro_batches, all_local=True))
        our_losses, our_norms, ours, starved = train(recipe(case, micro_batches, all_local=False))
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
