"""MG: a Megatron GPT trained with FORGE against Megatron's own optimizer, from identical weights.

The launcher's own model, optimizers, schedule and step. Two runs: weights stepped inside backward, with nothing that
has to wait; and waiting, with two micro-batches and clipping that is in force at every step. Catches what neither pair
gate sees: norms and biases beside owned weights, the learning-rate schedule, clipping, accumulation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gates.gate import Case, Gate, Reading

if TYPE_CHECKING:
    from launch.config import Recipe

STEPS = 20
SEQUENCE, BATCH = 64, 4
# The losses' bounds are the paper's. Norms and states are compared too, because Adam hides a constant factor on the
# gradient from the losses: some units in the last place of a sum, and in bf16 of a gradient rounded to it.
LOSS = {"fp32": 2e-6, "bf16": 3.8e-4}
NORM = {"fp32": 2.0**-20, "bf16": 2.0**-8}
STATES = {"fp32": 2.0**-18, "bf16": 2.0**-6}


def recipe(case: Case, waiting: bool) -> Recipe:
    from launch import config

    tp = case.degrees.tp
    return config.Recipe(
        model=config.Model(
            num_layers=2, hidden_size=16 * tp, ffn_hidden_size=64 * tp, num_attention_heads=2 * tp,
            vocab_size=128 * tp, bias=True, dtype=case.dtype,
        ),
        parallel=config.Parallel(tensor=tp, sequence=case.sp),
        data=config.Data(sequence_length=SEQUENCE),
        batch=config.Batch(micro=BATCH, total=BATCH * (2 if waiting else 1)),
        optimizer=config.Optimizer(
            recipe="fp32-master" if case.dtype == "bf16" else None,
            lr=5e-4, warmup_steps=5, clip_grad=0.1 if waiting else 0.0,
        ),
        run=config.Run(dir="", steps=STEPS, device=case.device),
    )  # fmt: skip


def batches(recipe: Recipe, device):
    """Micro-batches of random tokens, the same for every rank and for both runs."""
    import torch

    generator = torch.Generator().manual_seed(5)
    shape = (recipe.batch.micro, SEQUENCE)
    for _ in range(STEPS * recipe.micro_batches):
        tokens, labels = (torch.randint(recipe.model.vocab_size, shape, generator=generator) for _ in range(2))
        positions = torch.arange(SEQUENCE).expand(shape)
        batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": torch.ones(shape)}
        yield {name: tensor.to(device) for name, tensor in batch.items()}


def train(recipe: Recipe, initial: dict | None):
    """Train for STEPS.

    Returns:
        losses and gradient norms, one a step; name -> (exp_avg, exp_avg_sq); the initial weights.
    """
    import torch

    from launch import step
    from launch.model import build_chunks
    from launch.optim import build_schedule, wrap_and_optimize

    device = torch.device(recipe.run.device, torch.cuda.current_device() if recipe.run.device == "cuda" else None)
    (model,) = build_chunks(recipe, recipe.model.vocab_size, device)
    if initial is not None:
        model.load_state_dict(initial)
    initial = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in model.state_dict().items()}
    chunks, optimizer = wrap_and_optimize(recipe, [model])
    scheduler = build_schedule(recipe, optimizer)
    step.connect(chunks, optimizer)
    expect_the_path(recipe, optimizer)
    data = batches(recipe, device)
    losses, norms = [], []
    for _ in range(STEPS):
        scheduler.step(1)
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        total, tokens = step.run(recipe, chunks, data, recipe.micro_batches).tolist()
        _, norm, _ = optimizer.step()
        losses.append(total / tokens)
        norms.append(norm)
    return losses, norms, states(model, optimizer), initial


def expect_the_path(recipe: Recipe, optimizer) -> None:
    """A comparison of Megatron with itself would be green: FORGE must own weights, and step them when it should."""
    ours = [o for o in optimizer.chained_optimizers if getattr(o, "forge", None) is not None]
    if recipe.optimizer.use_forge != any(o.forge.owned for o in ours):
        raise AssertionError(f"use_forge={recipe.optimizer.use_forge} and FORGE owns weights in {len(ours)} optimizers")
    if any(o.waits != (recipe.micro_batches > 1) for o in ours):
        raise AssertionError(f"{recipe.micro_batches} micro-batches, and waits={[o.waits for o in ours]}")


def states(model, optimizer) -> dict:
    """Parameter name -> (exp_avg, exp_avg_sq), whichever of Megatron's or FORGE's optimizers keeps them."""
    inner = [one for o in optimizer.chained_optimizers for one in (o.optimizer, getattr(o, "forge", None))]
    kept = {id(p): state for one in inner if one is not None for p, state in one.state.items()}
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        stepped = getattr(parameter, "main_param", None)
        state = kept[id(parameter if stepped is None or id(parameter) in kept else stepped)]
        found[name] = (state["exp_avg"], state["exp_avg_sq"])
    return found


def measure(case: Case) -> list[Reading]:
    from gates.pair import worst_relative_rms

    readings = []
    for waiting, how in ((False, "in backward"), (True, "waiting")):
        with_forge = recipe(case, waiting)
        without = replace(with_forge, optimizer=replace(with_forge.optimizer, use_forge=False))
        losses, norms, reference, initial = train(without, None)
        our_losses, our_norms, ours, _ = train(with_forge, initial)
        gap = max(abs(a - b) for a, b in zip(our_losses, losses, strict=True))
        norm_gap = max(abs(a / b - 1) for a, b in zip(our_norms, norms, strict=True))
        pairs = [(a, b) for name in reference for a, b in zip(ours[name], reference[name], strict=True)]
        state_gap = worst_relative_rms([a for a, _ in pairs], [b for _, b in pairs])
        readings += [
            Reading(f"loss gap, {how}", gap, LOSS[case.dtype]),
            Reading(f"norm gap, {how}", norm_gap, NORM[case.dtype]),
            Reading(f"Δstate, {how}", state_gap, STATES[case.dtype]),
        ]
    return readings


GATE = Gate(
    id="MG",
    compares=f"a Megatron GPT with FORGE against Megatron's own optimizer, from identical weights, {STEPS} steps",
    least=1,
    sp=(False, True),
    dtypes=("fp32", "bf16"),
    measure=measure,
)
