"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from launch import checkpoint, data, selftest, step
from launch.capture import captured_step
from launch.config import Recipe, to_yaml
from launch.metrics import Metrics, Step, Validation, peak_memory_bytes
from launch.model import build_chunks
from launch.optim import build_schedule, gradient_bytes, tune, wrap_and_optimize
from launch.reorder import permute_hidden
from launch.state import Progress, restore, sharded_state
from launch.stop import StopSignals
from launch.tokenizer import build_tokenizer


class Trainer:
    """Model, optimizer, schedule and data of a recipe on this rank, and the loop over its steps."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.tokenizer = build_tokenizer(recipe.data.tokenizer)
        models = build_chunks(recipe, self.tokenizer.vocab_size, device)
        if recipe.run.reorder:
            for model in models:
                permute_hidden(model, recipe.model.hidden_size)
        self.chunks, self.optimizer = wrap_and_optimize(recipe, models)
        self.scheduler = build_schedule(recipe, self.optimizer)
        step.connect(self.chunks, self.optimizer)
        self.folder = Path(recipe.run.dir) / "checkpoints"
        self.notes: list[str] = [tune(recipe, self.optimizer)] if recipe.optimizer.tune else []
        self.progress = self._resume()
        self.train_set, self.valid_set = data.build_datasets(recipe, self.tokenizer, self.progress.horizon)
        self.captured = captured_step(recipe, self.chunks, self.optimizer) if recipe.run.capture else None

    def _resume(self) -> Progress:
        recipe = self.recipe
        whole = checkpoint.newest_whole(self.folder) if recipe.checkpoint.resume else None
        if whole is None:
            horizon = recipe.data.samples or recipe.run.steps * recipe.batch.total
            return Progress(step=0, horizon=horizon, ranks=dist.get_world_size())
        progress = restore(recipe, whole, self.chunks, self.optimizer, self.scheduler, self.notes.append)
        self.notes.append(f"resumed from {whole.name}")
        return Progress(progress.step, progress.horizon, dist.get_world_size())

    def _fingerprint(self) -> list[float]:
        """Sum and sum of squares of the weights over all ranks: equal for runs that begin alike."""
        weights = [p.detach().double() for chunk in self.chunks for p in chunk.parameters()]
        sums = torch.stack([sum(w.sum() for w in weights), sum(w.square().sum() for w in weights)])
        dist.all_reduce(sums)
        return sums.tolist()

    def _state(self) -> dict:
        return sharded_state(self.recipe, self.chunks, self.optimizer, self.scheduler, self.progress)

    def _save(self) -> None:
        checkpoint.save(self.folder, self.progress.step, self._state(), self.recipe.checkpoint.keep)

    def _validate(self) -> Validation:
        recipe = self.recipe
        samples = min(recipe.validation.samples, len(self.valid_set))
        count = max(1, samples // (recipe.batch.micro * recipe.parallel.data))
        for chunk in self.chunks:
            chunk.eval()
        batches = data.validation_batches(recipe, self.valid_set, self.device, count)
        with torch.no_grad():
            sums = step.run(recipe, self.chunks, batches, count, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        loss, _ = step.reduce(sums, stop=False)
        bits = loss / math.log(2) if recipe.data.tokenizer == "byte" else None
        return Validation(self.progress.step, loss, bits)

    def _step(self, batches) -> tuple[torch.Tensor, float]:
        # Before the backward, which may already update the weights with the learning rate.
        self.scheduler.step(1)
        if self.captured is not None:
            sums, _, norm = self.captured(list(batches))
            return sums, norm.item()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = step.run(self.recipe, self.chunks, batches, self.recipe.micro_batches)
        _, norm, _ = self.optimizer.step()
        return sums, float(norm)

    def run(self, stop: StopSignals) -> None:
        """Train from the current step to the recipe's last, or to the step at which any rank was
        asked to stop; then save."""
        recipe = self.recipe
        metrics = Metrics(recipe, dist.get_rank(), self.progress.step, weights=self._fingerprint())
        if dist.get_rank() == 0:
            (Path(recipe.run.dir) / "recipe.yaml").write_text(to_yaml(recipe))
        for text in self.notes:
            metrics.note(text)
        try:
            self._loop(metrics, stop)
            metrics.end(step=self.progress.step, gradient_bytes=gradient_bytes(self.chunks))
        finally:
            metrics.close()

    def _loop(self, metrics: Metrics, stop: StopSignals) -> None:
        recipe, first = self.recipe, self.progress.step
        tokens = recipe.batch.total * recipe.data.sequence_length
        batches = data.micro_batches(recipe, self.train_set, self.device, first, recipe.run.steps)
        for number in range(first + 1, recipe.run.steps + 1):
            begun = time.perf_counter()
            sums, norm = self._step(islice(batches, recipe.micro_batches))
            loss, stopping = step.reduce(sums, stop.requested)
            seconds = time.perf_counter() - begun
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss {loss} at step {number}; the checkpoints before it are kept")
            self.progress = Progress(number, self.progress.horizon, self.progress.ranks)
            lr = self.optimizer.param_groups[0]["lr"]
            memory = peak_memory_bytes(self.device)
            metrics.step(Step(number, loss, norm, lr, tokens / seconds, seconds, memory))
            if number == first + 1 and recipe.checkpoint.save and recipe.checkpoint.self_test:
                selftest.run(self.folder, number, self._state())
            if self._due(recipe.validation.every) and self.valid_set is not None:
                metrics.validation(self._validate())
            if recipe.checkpoint.save and (stopping or self._due(recipe.checkpoint.every)):
                self._save()
            if stopping:
                metrics.note(f"stopped at step {number} by a signal", step=number)
                return

    def _due(self, every: int) -> bool:
        last = self.progress.step == self.recipe.run.steps
        return last or (every > 0 and self.progress.step % every == 0)
