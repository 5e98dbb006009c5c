"""A model, its optimizer and one batch, and their step: eager, or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from forge_megatron.vocab import causal_lm_loss
from launch.bench import liger
from launch.bench.arm import Arm, Settings
from launch.bench.layout import Layout
from launch.bench.meter import tensors_in
from launch.bench.model import build
from launch.bench.shapes import Shape

CALLS_BEFORE_CAPTURE = 3


@dataclass
class Loop:
    """What is timed.

    Attributes:
        tokens: ``[batch, sequence]`` of each micro-batch, this rank's.
    """

    model: nn.Module
    optimizer: object
    tokens: list[torch.Tensor]
    arm: Arm

    def forward(self, micro_batch: int = 0) -> torch.Tensor:
        """The loss, divided by the number of micro-batches."""
        tokens = self.tokens[micro_batch]
        if self.arm.fused_head:
            loss = causal_lm_loss(self.model, tokens, tokens)
        elif self.arm.liger_loss:
            loss = liger.causal_lm_loss(self.model, tokens)
        else:
            loss = self.model(input_ids=tokens, labels=tokens).loss
        return loss if len(self.tokens) == 1 else loss / len(self.tokens)

    def backward(self, loss: torch.Tensor) -> None:
        getattr(self.optimizer, "backward", torch.Tensor.backward)(loss)

    def update(self) -> None:
        if self.arm.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.arm.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[str]:
        """Forward and backward of all micro-batches; the name of each phase when it has been given to the device."""
        for micro_batch in range(len(self.tokens)):
            loss = self.forward(micro_batch)
            yield "forward"
            self.backward(loss)
            del loss
            yield "backward"

    def step(self) -> torch.Tensor:
        """All of it; returns the loss of the whole batch."""
        total = None
        for micro_batch in range(len(self.tokens)):
            loss = self.forward(micro_batch)
            self.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        self.update()
        return total

    @property
    def layers(self) -> nn.ModuleList:
        return next(module for module in self.model.modules() if isinstance(module, nn.ModuleList))

    def weight_tensors(self) -> list[torch.Tensor]:
        """This rank's; DeepSpeed's parameters are empty where it has taken them to pieces."""
        return [getattr(p, "ds_tensor", p) for p in self.model.parameters()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        inside = tensors_in(getattr(self.optimizer, "gradients", ()))
        return [p.grad for p in self.model.parameters() if p.grad is not None] + inside

    def owned_weights(self) -> list[torch.Tensor]:
        return list(getattr(self.optimizer, "owned", ()))

    def optimizers(self) -> list:
        """Those with a state of their own."""
        inside = getattr(self.optimizer, "optimizers", ())
        # ZeroRedundancyOptimizer's own state is of the whole; this rank's part is in the optimizer that it wraps.
        return [getattr(one, "optim", one) for one in (self.optimizer, *inside)]


def prepare(
    shape: Shape, arm: Arm, device: str, batch: int, sequence: int, settings: Settings, layout: Layout | None = None
) -> Loop:
    """The model with its optimizer, and the same tokens for every arm; a rank has its part of them."""
    if arm.megatron is not None:
        from launch.bench import megatron_loop

        return megatron_loop.prepare(shape, arm, device, batch, sequence, settings, layout)
    if arm.dtype is not None:
        shape = replace(shape, dtype=arm.dtype)
    model = build(shape, device)
    world, rank = (dist.get_world_size(), dist.get_rank()) if arm.over_ranks else (1, 0)
    generator = torch.Generator(device=device).manual_seed(1)
    rows = (arm.micro_batches, world * batch, sequence)
    tokens = torch.randint(shape.vocab_size, rows, generator=generator, device=device)
    mine = [part[rank * batch : (rank + 1) * batch].clone() for part in tokens]
    made = arm.attach(model, settings)
    model, optimizer = made if isinstance(made, tuple) else (model, made)
    return Loop(model, optimizer, mine, arm)


def stepper(loop: Loop) -> Callable[[], torch.Tensor]:
    """The whole step as one call: a CUDA graph where the arm is a captured one and a GPU is there."""
    if not loop.arm.captured or loop.tokens[0].device.type != "cuda":
        return loop.step
    if hasattr(loop.optimizer, "capture"):
        return loop.optimizer.capture(loop.step)
    return _captured(loop)


def _captured(loop: Loop) -> Callable[[], torch.Tensor]:
    """What torch documents for a whole step: calls on a side stream, then one graph. Every call is one step."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    calls = 0
    captured: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls <= CALLS_BEFORE_CAPTURE:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = loop.step()
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if not captured:
            with torch.cuda.graph(graph):
                captured.append(loop.step())
        graph.replay()
        return captured[0]

    return run
