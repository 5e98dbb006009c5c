"""A model, its optimizer and one batch on megatron.core's schedules, by the trainer's own code.

Imported only where ``launch.cpu.enable`` has been called, as megatron-core is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from launch import step
from launch.bench.arm import Arm, Settings
from launch.bench.layout import Layout, recipe
from launch.bench.shapes import Shape
from launch.config import Recipe
from launch.data import on_this_context_rank
from launch.distributed import seed
from launch.model import build_chunks


class MegatronLoop:
    """What is timed, with :class:`launch.bench.loop.Loop`'s names.

    Attributes:
        model: this rank's chunks.
        batches: the step's micro-batches, as the trainer's ``launch.step`` takes them.
    """

    def __init__(self, recipe: Recipe, arm: Arm, chunks: list, optimizer, batches: list[dict[str, Tensor]]):
        self.recipe, self.arm, self.chunks, self.optimizer, self.batches = recipe, arm, chunks, optimizer, batches
        self.model = nn.ModuleList(chunks)
        self.sums: Tensor | None = None
        step.connect(chunks, optimizer)

    @property
    def layers(self) -> list[nn.Module]:
        """None of a pipeline: its micro-batches take turns, and the schedule frees outputs, which hooks make views."""
        if self.recipe.parallel.pipeline > 1:
            return []
        return [layer for chunk in self.chunks for layer in chunk.module.decoder.layers]

    def gradients(self) -> Iterator[str]:
        """Forward and backward of all micro-batches, which a schedule does not part."""
        self.sums = step.run(self.recipe, self.chunks, iter(self.batches), len(self.batches))
        yield "forward, backward"

    def update(self) -> None:
        self.optimizer.step()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> Tensor:
        """All of it; returns the loss of the whole batch, of all ranks."""
        for _ in self.gradients():
            pass
        self.update()
        return torch.tensor(step.reduce(self.sums, stop=False)[0])

    def weight_tensors(self) -> list[Tensor]:
        return list(self.model.parameters())

    def gradient_tensors(self) -> list[Tensor]:
        """Megatron's buffers, and what lies outside of them."""
        buffers = [buffer for chunk in self.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        outside = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [buffer.grad_data for buffer in buffers] + outside

    def optimizers(self) -> list:
        """The torch optimizers, and FORGE's, in Megatron's."""
        each = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        inner = [getattr(one, name, None) for one in each for name in ("optimizer", "forge")]
        return [one for one in inner if one is not None]

    def owned_weights(self) -> list[Tensor]:
        each = getattr(self.optimizer, "chained_optimizers", [])
        groups = [group for one in each if hasattr(one, "forge") for group in one.forge.param_groups]
        return [p for group in groups for p in group["params"]]


def prepare(
    shape: Shape, arm: Arm, device: str, batch: int, sequence: int, settings: Settings, layout: Layout
) -> MegatronLoop:
    """The chunks of this rank with their optimizer, and the same tokens for every arm; a rank has its part of them."""
    kind = torch.device(device)
    made = recipe(shape, layout, batch, sequence, settings, kind.type, arm.megatron)
    seed(made.run.seed)
    chunks, optimizer = arm.attach(made, build_chunks(made, shape.vocab_size, kind))
    return MegatronLoop(made, arm, chunks, optimizer, list(_batches(made, kind)))


def _batches(made: Recipe, device: torch.device) -> Iterator[dict[str, Tensor]]:
    micro, ranks, rank = made.batch.micro, made.parallel.data, parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1)
    rows = (made.micro_batches, ranks * micro, made.data.sequence_length + 1)
    for whole in torch.randint(made.model.vocab_size, rows, generator=generator):
        mine = whole[rank * micro : (rank + 1) * micro]
        tokens, labels = mine[:, :-1], mine[:, 1:]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        batch = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": torch.ones(tokens.shape)}
        yield on_this_context_rank({name: tensor.contiguous().to(device) for name, tensor in batch.items()})
