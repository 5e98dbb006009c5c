"""``run.capture``: the trainer's step as one CUDA graph, and the recipes that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.config import Recipe, RecipeError

if TYPE_CHECKING:
    from forge_megatron.megatron.capture import CapturedTrainStep

_RANKS = ("parallel.tensor", "parallel.pipeline", "parallel.context", "parallel.data", "parallel.expert")


def check_capture(recipe: Recipe, device: str) -> None:
    """Raises ``RecipeError`` where ``run.capture`` is set, by the key that stands in its way."""
    if not recipe.run.capture:
        return
    if device != "cuda":
        raise RecipeError("run.capture", f"a CUDA graph on {device}: set it to false, or run.device=cuda")
    if not recipe.optimizer.use_forge:
        raise RecipeError("run.capture", "needs optimizer.use_forge=true")
    for key in _RANKS:
        if recipe.get(key) > 1:
            raise RecipeError(key, f"{recipe.get(key)}: run.capture is for one GPU: set it to 1, or run.capture=false")
    if recipe.model.num_experts is not None:
        raise RecipeError("model.num_experts", "experts' tokens are counted on the host: set run.capture=false")
    if recipe.run.deterministic:
        raise RecipeError("run.deterministic", "torch's deterministic index_put asks the device: set run.capture=false")
    if recipe.model.dropout and recipe.model.recompute != "none":
        raise RecipeError("model.recompute", "with dropout no graph draws a mask again: set one of them to none or 0")


def captured_step(recipe: Recipe, chunks: list, optimizer) -> CapturedTrainStep:
    """Takes a step's micro-batches as a list; what it returns first is :func:`launch.step.run`'s."""
    from forge_megatron.megatron import capture_train_step
    from launch import step

    def forward_backward(batches: list[dict]):
        return step.run(recipe, chunks, iter(batches), len(batches))

    return capture_train_step(optimizer, chunks, forward_backward)
