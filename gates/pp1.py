"""PP1: a GPT in pipeline stages with FORGE against one process with torch.

The launcher's own chunks, optimizers and step on megatron.core's schedules. The reference has the whole model and each
micro-batch in turn, and uses ``torch.optim.AdamW``. Catches a micro-batch that is forgotten or counted twice, weights
that change before their last use in the step, a norm of one stage alone, and a tied pair whose sum misses a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gates.gate import Case, Degrees, Gate, Reading

if TYPE_CHECKING:
    from gates.pair import Run
    from launch.config import Recipe

STEPS, SEQUENCE, MICRO = 5, 32, 2
CHUNKS = 2
# Of a vocabulary that the launcher pads to 128: learned in a few steps, after which losses are below 4, where two units
# in the last place are less than the bound.
TOKENS, LEARNING = 16, 12
# The losses' bound is the paper's. Weights and states carry the rounding of sums in another order, and the states are
# compared because Adam hides a constant factor on the gradient from the weights.
LOSS, WEIGHTS, STATES = 6e-7, 2.0**-23, 2.0**-18
# eps as in gates/pair.py: about a tenth of a typical gradient.
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4}
DECAY = 0.1


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        chunks: of the model a stage, interleaved; None: one, 1F1B.
        rounds: micro-batches a step, in multiples of the stages; 0: one alone, stepped inside backward.
        tied: head and embedding share their weight, which the first and the last stage hold.
        clip: largest global norm; 0: none.
    """

    chunks: int | None = None
    rounds: int = 2
    tied: bool = False
    clip: float = 0.0

    def micro_batches(self, case: Case) -> int:
        return self.rounds * case.degrees.pp or 1


ARMS = {
    "1F1B, in backward": Arm(rounds=0),
    "1F1B": Arm(),
    "1F1B, tied, clipped": Arm(tied=True, clip=0.1),
    "interleaved": Arm(chunks=CHUNKS),
    "interleaved, tied, clipped": Arm(chunks=CHUNKS, tied=True, clip=0.1),
}


def recipe(case: Case, arm: Arm, stages: int) -> Recipe:
    from launch import config

    return config.Recipe(
        model=config.Model(
            num_layers=CHUNKS * case.degrees.pp, hidden_size=32, ffn_hidden_size=64,
            num_attention_heads=max(4, case.degrees.cp), vocab_size=128, bias=True, tied_head=arm.tied,
        ),
        parallel=config.Parallel(pipeline=stages, virtual_pipeline=arm.chunks if stages > 1 else None),
        data=config.Data(sequence_length=SEQUENCE),
        batch=config.Batch(micro=MICRO, total=MICRO * arm.micro_batches(case)),
        optimizer=config.Optimizer(
            lr=ADAMW["lr"], beta1=ADAMW["betas"][0], beta2=ADAMW["betas"][1], eps=ADAMW["eps"], weight_decay=DECAY,
            decay_style="constant", clip_grad=arm.clip,
        ),
        run=config.Run(dir="", steps=STEPS, device=case.device),
    )  # fmt: skip


def batches(case: Case, arm: Arm, seed: int, steps: int):
    """Micro-batches of random tokens with masks of different sizes, the same on every rank."""
    import torch

    from gates.pair import device_of

    generator, shape = torch.Generator().manual_seed(seed), (MICRO, SEQUENCE)
    for _ in range(steps * arm.micro_batches(case)):
        tokens, labels = (torch.randint(TOKENS, shape, generator=generator) for _ in range(2))
        mask = (torch.rand(shape, generator=generator) < 0.8).float()
        positions = torch.arange(SEQUENCE).expand(shape)
        batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": mask}
        yield {name: tensor.to(device_of(case)) for name, tensor in batch.items()}


def alone(case: Case, arm: Arm) -> tuple[dict, Run]:
    """The reference in this process: the weights that it has learned first, and the run that is compared."""
    from gates.pair import STATES as KEPT
    from gates.pair import Run, device_of
    from launch.distributed import seed
    from launch.model import build_chunks

    whole = recipe(case, arm, 1)
    seed(whole.run.seed)
    (model,) = build_chunks(whole, whole.model.vocab_size, device_of(case))
    learning = replace(arm, rounds=0)
    _steps(case, learning, model, batches(case, learning, 3, LEARNING), LEARNING, lr=1e-2)
    named = dict(model.named_parameters())
    initial = {name: p.detach().clone() for name, p in named.items()}
    losses, optimizer = _steps(case, arm, model, batches(case, arm, 5, STEPS), STEPS)
    states = {name: tuple(optimizer.state[p][state] for state in KEPT) for name, p in named.items()}
    return initial, Run({name: p.detach() for name, p in named.items()}, states, losses)


def _steps(case: Case, arm: Arm, model, data, steps: int, **changed):
    """Losses of each step of the whole model by torch alone, and the optimizer. Biases and norms do not decay."""
    import torch

    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == decays]} for decays in (True, False)]
    for group, decay in zip(groups, (DECAY, 0.0), strict=True):
        group["weight_decay"] = decay
    optimizer = torch.optim.AdamW(groups, foreach=False, **{**ADAMW, **changed})
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, tokens = 0.0, 0.0
        for _ in range(arm.micro_batches(case)):
            batch = next(data)
            each = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            loss = (each * batch["loss_mask"]).sum()
            (loss / batch["loss_mask"].sum() / arm.micro_batches(case)).backward()
            total, tokens = total + loss.item(), tokens + batch["loss_mask"].sum().item()
        if arm.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), arm.clip)
        optimizer.step()
        losses.append(total / tokens)
    return losses, optimizer


def pipeline(case: Case, arm: Arm, initial: dict) -> Run:
    """FORGE on this rank's chunks, from the weights that one process has, by the names that it has for them."""
    from megatron.core import parallel_state

    from gates.mg import states
    from gates.pair import Run, device_of
    from launch.model import build_chunks

    parallel_state.set_virtual_pipeline_model_parallel_world_size(arm.chunks)
    staged = recipe(case, arm, case.degrees.pp)
    models = build_chunks(staged, staged.model.vocab_size, device_of(case))
    named = {name: (model, own) for model in models for own, name in names_in_one(model, arm).items()}
    for name, (model, own) in named.items():
        model.get_parameter(own).data.copy_(initial[name])
    losses, optimizer = train(staged, models, batches(case, arm, 5, STEPS))
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    kept = {model: states(model, optimizer) for model in models}
    weights = {name: model.get_parameter(own).detach() for name, (model, own) in named.items()}
    return Run(weights, {name: kept[model][own] for name, (model, own) in named.items()}, losses)


def train(job: Recipe, models: list, data):
    """The launcher's steps with FORGE on this rank's chunks: the losses of each step, and the optimizer."""
    from gates.mg import expect_the_path
    from launch import step
    from launch.optim import build_schedule, wrap_and_optimize

    chunks, optimizer = wrap_and_optimize(job, models)
    scheduler = build_schedule(job, optimizer)
    step.connect(chunks, optimizer)
    expect_the_path(job, optimizer)
    losses = []
    for _ in range(STEPS):
        scheduler.step(1)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        sums = step.run(job, chunks, (next(data) for _ in range(job.micro_batches)), job.micro_batches)
        optimizer.step()
        losses.append(step.reduce(sums, stop=False)[0])
    return losses, optimizer


def names_in_one(model, arm: Arm) -> dict[str, str]:
    """A chunk's parameter -> its name in one process; the last stage's copy of a tied pair is the embedding."""
    from forge_megatron.megatron.conversion import global_names

    names = global_names(model)
    if arm.tied and "output_layer.weight" in names:
        names["output_layer.weight"] = "embedding.word_embeddings.weight"
    return names


def _not_interleaved(arm: Arm) -> Arm:
    return replace(arm, chunks=None)


def compared(how: str, ours: Run, reference: Run) -> list[Reading]:
    """Losses, weights and states against those of one process."""
    from gates.pair import relative_rms, weights_of, worst_relative_rms

    gap = max(abs(a - b) for a, b in zip(ours.losses, reference.losses, strict=True))
    theirs = [reference.weights[name] for name in ours.weights]
    pairs = [(a, b) for name, own in ours.states.items() for a, b in zip(own, reference.states[name], strict=True)]
    return [
        Reading(f"loss gap, {how}", gap, LOSS),
        Reading(f"ΔW, {how}", relative_rms(weights_of(ours), theirs), WEIGHTS),
        Reading(f"Δstate, {how}", worst_relative_rms([a for a, _ in pairs], [b for _, b in pairs]), STATES),
    ]


def measure(case: Case) -> list[Reading]:
    from gates.layout import instead_of

    # Each rank is one process; whether the schedule interleaves makes no difference there.
    with instead_of(case.degrees, Degrees(dp=case.degrees.pp)):
        references = {arm: alone(case, arm) for arm in dict.fromkeys(map(_not_interleaved, ARMS.values()))}
    readings = []
    for how, arm in ARMS.items():
        initial, reference = references[_not_interleaved(arm)]
        readings += compared(how, pipeline(case, arm, initial), reference)
    return readings


GATE = Gate(
    id="PP1",
    compares="a Megatron GPT in stages with FORGE against one process with torch.optim: losses, weights, states",
    axis="pp",
    least=2,
    sp=(False,),
    dtypes=("fp32",),
    measure=measure,
)
