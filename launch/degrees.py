"""Parallel degrees that cannot run, by their keys; part of the preflight."""

from __future__ import annotations

from launch.config import Recipe, RecipeError


def divides(recipe: Recipe, key: str, divisor: int, what: str) -> None:
    value = recipe.get(key)
    if value % divisor:
        raise RecipeError(key, f"{value} is not divisible by {what}={divisor}")


def check_degrees(recipe: Recipe) -> None:
    if recipe.parallel.distributed_optimizer and recipe.parallel.data == 1:
        raise RecipeError("parallel.distributed_optimizer", "states are shared over data ranks: set parallel.data too")
    _check_pipeline(recipe)


def _check_pipeline(recipe: Recipe) -> None:
    parallel, batch = recipe.parallel, recipe.batch
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks is None:
        divides(recipe, "model.num_layers", stages, "parallel.pipeline")
        return
    if stages == 1 or chunks == 1:
        raise RecipeError(
            "parallel.virtual_pipeline",
            f"{chunks} chunks on each of {stages} stages: interleaving needs 2 and 2; 1F1B is null",
        )
    divides(recipe, "model.num_layers", stages * chunks, "parallel.pipeline * parallel.virtual_pipeline")
    round_of_all = batch.micro * parallel.data * stages
    validates = recipe.data.valid or recipe.data.synthetic
    for key in ("batch.total", *(["validation.samples"] if validates else [])):
        if recipe.get(key) % round_of_all:
            raise RecipeError(
                key,
                f"{recipe.get(key)} is no multiple of batch.micro * parallel.data * parallel.pipeline={round_of_all}, "
                "and interleaved stages take micro-batches in rounds of one each",
            )


def check_context(recipe: Recipe) -> None:
    model, parallel = recipe.model, recipe.parallel
    if parallel.context == 1:
        return
    divides(recipe, "data.sequence_length", 2 * parallel.context, "2 * parallel.context")
    if parallel.context_comm == "a2a":
        ranks = parallel.tensor * parallel.context
        divides(recipe, "model.num_attention_heads", ranks, "parallel.tensor * parallel.context, for context_comm=a2a")
    if parallel.context_comm == "p2p" and model.dropout and model.transformer_engine != "always":
        raise RecipeError("model.dropout", f"{model.dropout}: a ring (parallel.context_comm=p2p) has none: set it to 0")


def check_experts(recipe: Recipe) -> None:
    model, parallel = recipe.model, recipe.parallel
    if model.num_experts is None:
        if parallel.expert > 1:
            raise RecipeError("parallel.expert", f"{parallel.expert} and no experts: set model.num_experts, or it to 1")
        if model.expert_grouped:
            raise RecipeError("model.expert_grouped", "true and no experts: set model.num_experts, or it to false")
        return
    divides(recipe, "model.num_experts", parallel.expert, "parallel.expert")
    if model.expert_topk > model.num_experts:
        raise RecipeError("model.expert_topk", f"{model.expert_topk} is above model.num_experts={model.num_experts}")
    if recipe.run.reorder:
        raise RecipeError("run.reorder", "true: not built for experts: set it to false")
    if model.bias:
        raise RecipeError("model.bias", "true: not built for experts: set it to false")
    if parallel.tensor > 1 and not parallel.sequence:
        raise RecipeError("parallel.sequence", "experts beside parallel.tensor above 1 need it: set it to true")
    if model.expert_ffn_hidden_size is not None:
        divides(recipe, "model.expert_ffn_hidden_size", parallel.tensor, "parallel.tensor")
    ranks = parallel.data * parallel.context
    if ranks % parallel.expert:
        raise RecipeError(
            "parallel.expert", f"{parallel.expert} does not divide parallel.data * parallel.context={ranks}"
        )
