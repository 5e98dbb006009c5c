"""Everything about a recipe that can be known to fail, before any process group is made.

Each check raises one ``RecipeError``, whose line begins with the key to change.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
from pathlib import Path

from launch import gpus
from launch.capture import check_capture
from launch.config import Recipe, RecipeError
from launch.degrees import check_context, check_degrees, check_experts, divides

_CHOICES = {
    "model.position_embedding": ("rope", "learned_absolute"),
    "model.normalization": ("RMSNorm", "LayerNorm"),
    "model.activation": ("swiglu", "gelu"),
    "model.dtype": ("fp32", "bf16"),
    "optimizer.accumulation_dtype": ("fp32", "bf16"),
    "model.recompute": ("none", "selective", "full"),
    "model.transformer_engine": ("auto", "always", "never"),
    "parallel.context_comm": ("all_gather", "a2a", "p2p"),
    "optimizer.update": ("auto", "backward", "step"),
    "optimizer.decay_style": ("cosine", "linear", "constant"),
    "run.device": ("auto", "cpu", "cuda"),
}
_POSITIVE = (
    "model.num_layers",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.num_experts",
    "model.expert_topk",
    "model.expert_ffn_hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.kv_channels",
    "model.vocab_size",
    "model.rotary_base",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.context",
    "parallel.expert",
    "parallel.data",
    "parallel.nodes",
    "data.sequence_length",
    "data.samples",
    "batch.micro",
    "batch.total",
    "optimizer.decay_steps",
    "validation.samples",
    "logging.every",
    "checkpoint.keep",
    "run.steps",
    "run.timeout_minutes",
)
_NOT_NEGATIVE = (
    "data.workers",
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.weight_decay",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.clip_grad",
    "optimizer.warmup_steps",
    "validation.every",
    "checkpoint.every",
    "model.dropout",
    "model.expert_aux_loss",
    "model.init_std",
    "model.norm_epsilon",
    "run.seed",
)
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "model.dropout")
_MAY_BE_INFINITE = "optimizer.clip_grad"  # no clipping


def check_values(recipe: Recipe) -> None:
    for key, choices in _CHOICES.items():
        if recipe.get(key) not in choices:
            raise RecipeError(key, f"{recipe.get(key)!r} is none of {', '.join(choices)}")
    for key in _POSITIVE:
        value = recipe.get(key)
        if value is not None and not value > 0:
            raise RecipeError(key, f"{value} must be above 0")
    for key in _NOT_NEGATIVE:
        value = recipe.get(key)
        if not value >= 0:
            raise RecipeError(key, f"{value} must not be negative")
        if math.isinf(value) and key != _MAY_BE_INFINITE:
            raise RecipeError(key, f"{value} must be finite")
    for key in _BELOW_ONE:
        if not recipe.get(key) < 1:
            raise RecipeError(key, f"{recipe.get(key)} must be below 1")


def check_sizes(recipe: Recipe) -> None:
    model, parallel, batch = recipe.model, recipe.parallel, recipe.batch
    groups = model.num_query_groups or model.num_attention_heads
    if model.kv_channels is None:
        divides(recipe, "model.hidden_size", model.num_attention_heads, "model.num_attention_heads")
    divides(recipe, "model.num_attention_heads", groups, "model.num_query_groups")
    divides(recipe, "model.num_attention_heads", parallel.tensor, "parallel.tensor")
    if groups % parallel.tensor:
        raise RecipeError("model.num_query_groups", f"{groups} is not divisible by parallel.tensor={parallel.tensor}")
    divides(recipe, "model.ffn_hidden_size", parallel.tensor, "parallel.tensor")
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    if model.position_embedding == "rope" and head % 2:
        raise RecipeError("model.kv_channels", f"rotary embeddings turn pairs: a head of {head} is odd")
    if parallel.sequence:
        if parallel.tensor == 1:
            raise RecipeError("parallel.sequence", "sequence parallelism needs parallel.tensor above 1")
        divides(
            recipe, "data.sequence_length", parallel.tensor * parallel.context, "parallel.tensor * parallel.context"
        )
    check_context(recipe)
    check_experts(recipe)
    divides(recipe, "batch.total", batch.micro * parallel.data, "batch.micro * parallel.data")
    if recipe.world_size % parallel.nodes:
        raise RecipeError("parallel.nodes", f"{recipe.world_size} ranks are not divisible by {parallel.nodes} nodes")
    if recipe.run.reorder and model.dropout:
        raise RecipeError("run.reorder", f"only roundings change, and model.dropout={model.dropout} would too")
    decay = recipe.optimizer.decay_steps or recipe.run.steps
    if recipe.optimizer.warmup_steps >= decay:
        raise RecipeError(
            "optimizer.warmup_steps", f"{recipe.optimizer.warmup_steps} leaves nothing of {decay} decay steps"
        )
    if recipe.optimizer.min_lr > recipe.optimizer.lr:
        raise RecipeError("optimizer.min_lr", f"{recipe.optimizer.min_lr} is above optimizer.lr={recipe.optimizer.lr}")


def check_optimizer(recipe: Recipe) -> None:
    optimizer, dtype = recipe.optimizer, recipe.model.dtype
    if dtype == "bf16" and optimizer.recipe != "fp32-master" and optimizer.clip_grad > 0:
        raise RecipeError(
            "optimizer.clip_grad",
            f"{optimizer.clip_grad}: Megatron clips fp32 gradients only, and these are bf16: set it to 0, or "
            "optimizer.recipe=fp32-master",
        )
    if optimizer.use_forge:
        _check_forge(recipe)
        return
    for key in ("fused_head", "tune"):
        if getattr(optimizer, key):
            raise RecipeError(f"optimizer.{key}", "needs optimizer.use_forge=true")
    if optimizer.rule != "adamw":
        raise RecipeError("optimizer.rule", f"{optimizer.rule!r}: the standard optimizer here is adamw")
    same = {"fp32": (None, "fp32-state", "fp32-master"), "bf16": (None, "bf16-state", "fp32-master")}[dtype]
    if optimizer.recipe not in same:
        known = ", ".join(filter(None, same))
        raise RecipeError("optimizer.recipe", f"{optimizer.recipe!r} on {dtype} weights needs forge; without: {known}")


def _check_forge(recipe: Recipe) -> None:
    from forge_megatron import formats, rules
    from launch.dtypes import DTYPES

    try:
        rules.get(recipe.optimizer.rule)
    except ValueError as error:
        raise RecipeError("optimizer.rule", str(error)) from error
    try:
        formats.resolve_recipe(DTYPES[recipe.model.dtype], recipe.optimizer.recipe)
    except (TypeError, ValueError) as error:
        raise RecipeError("optimizer.recipe", str(error)) from error
    waiting = {
        "optimizer.clip_grad": recipe.optimizer.clip_grad > 0,
        "batch.total": recipe.micro_batches > 1,
        "batch.per_token_loss": recipe.batch.per_token_loss,
    }
    reasons = ", ".join(f"{key}={recipe.get(key)}" for key, waits in waiting.items() if waits)
    if recipe.optimizer.update == "backward" and reasons:
        raise RecipeError("optimizer.update", f"backward cannot be exact with {reasons}: set it to auto")


def index_builder() -> Path | None:
    """megatron-core's compiled dataset index builder for this interpreter; None where there is none, as
    when a wheel for one Python is put on the path of another."""
    core = importlib.util.find_spec("megatron.core")
    names = [f"helpers_cpp{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    found = (Path(core.origin).parent / "datasets" / name for name in names)
    return next((path for path in found if path.is_file()), None)


def check_megatron(recipe: Recipe) -> None:
    try:
        builder = index_builder()
    except ModuleNotFoundError as error:
        raise RecipeError("megatron-core", "not installed: pip install 'megatron-core>=0.16,<0.20'") from error
    if builder is None:
        raise RecipeError("megatron-core", "its dataset index builder is not compiled for this Python: reinstall it")


def check_tokenizer(recipe: Recipe) -> None:
    if recipe.data.tokenizer != "byte" and importlib.util.find_spec("transformers") is None:
        raise RecipeError("data.tokenizer", f"{recipe.data.tokenizer!r} needs transformers (pip install transformers)")
    from launch.tokenizer import build_tokenizer

    try:
        tokenizer = build_tokenizer(recipe.data.tokenizer)
    except (OSError, ValueError) as error:
        raise RecipeError("data.tokenizer", f"{recipe.data.tokenizer!r}: {error}") from error
    if recipe.model.vocab_size is not None and recipe.model.vocab_size < tokenizer.vocab_size:
        raise RecipeError(
            "model.vocab_size", f"{recipe.model.vocab_size} is below the tokenizer's {tokenizer.vocab_size}"
        )
    for key in ("data.train", "data.valid"):
        for prefix in recipe.get(key):
            described = Path(prefix).parent / "data.json"
            if described.is_file():
                written = json.loads(described.read_text())["tokenizer"]
                if written != tokenizer.unique_identifiers:
                    raise RecipeError("data.tokenizer", f"{prefix} was written with {written}")


def check_data(recipe: Recipe) -> None:
    data = recipe.data
    if data.synthetic and (data.train or data.valid):
        raise RecipeError("data.synthetic", "either synthetic data or data.train and data.valid")
    if not data.synthetic and not data.train:
        raise RecipeError("data.train", "no dataset: python -m launch.prepare makes one, or data.synthetic=true")
    if data.train_weights and not all(0 < weight < math.inf for weight in data.train_weights):
        raise RecipeError("data.train_weights", f"{list(data.train_weights)}: each must be above 0 and finite")
    if data.train_weights and len(data.train_weights) != len(data.train):
        raise RecipeError("data.train_weights", f"{len(data.train_weights)} weights for {len(data.train)} datasets")
    for key in ("data.train", "data.valid"):
        for prefix in recipe.get(key):
            for suffix in (".idx", ".bin"):
                path = Path(prefix + suffix)
                if not path.is_file() or path.stat().st_size == 0:
                    raise RecipeError(key, f"{path} is missing or empty: python -m launch.prepare writes such files")
    if recipe.validation.every and not data.valid and not data.synthetic:
        raise RecipeError("validation.every", f"{recipe.validation.every}, and data.valid names no dataset")


def check_folders(recipe: Recipe) -> None:
    for key in ("run.dir", "data.cache"):
        folder = recipe.get(key)
        if folder is None:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            probe = Path(folder) / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise RecipeError(key, f"{folder} cannot be written: {error.strerror}") from error


def state_bytes(recipe: Recipe) -> int:
    """A lower bound of a rank's weights and optimizer states in bytes: activations, gradients and
    the communication's buffers come on top."""
    from forge_megatron import formats, rules
    from launch.dtypes import DTYPES

    model, wide = recipe.model, 4 if recipe.model.dtype == "fp32" else 2
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    attention = model.hidden_size * head * (2 * model.num_attention_heads + 2 * groups)
    mlp = model.hidden_size * (3 if model.activation == "swiglu" else 2)
    if model.num_experts is None:
        mlp *= model.ffn_hidden_size
    else:
        mlp *= (model.expert_ffn_hidden_size or model.ffn_hidden_size) * model.num_experts // recipe.parallel.expert
    stages = recipe.parallel.pipeline
    embeddings = (model.vocab_size or 0) * model.hidden_size * (1 if model.tied_head or stages > 1 else 2)
    weights = model.num_layers // stages * (attention + mlp) + embeddings
    stored, store = formats.resolve_recipe(DTYPES[model.dtype], recipe.optimizer.recipe)
    state = stored.signed.dtype.itemsize
    master = 4 if store.master and wide == 2 else 0
    weight = 1 if store.name == "fp8" else wide
    states = len(rules.get(recipe.optimizer.rule).states)
    sharers = recipe.parallel.data if recipe.parallel.distributed_optimizer else 1
    return weights * (weight + (states * state + master) // sharers) // recipe.parallel.tensor


def resolve_device(recipe: Recipe) -> str:
    """``"cpu"`` or ``"cuda"``.

    Raises:
        RecipeError: a GPU is asked for and torch finds none.
    """
    import torch

    available = torch.cuda.is_available()
    if recipe.run.device == "cuda" and not available:
        raise RecipeError("run.device", "cuda is asked for, and torch finds no GPU")
    if recipe.run.device == "auto":
        return "cuda" if available else "cpu"
    return recipe.run.device


def check_backend(recipe: Recipe, device: str) -> None:
    from forge_megatron import kernels

    try:
        kernels.resolve_backend(device, recipe.optimizer.backend)
    except (ValueError, RuntimeError) as error:
        raise RecipeError("optimizer.backend", str(error)) from error


def check_gpus(recipe: Recipe) -> None:
    ranks = recipe.world_size // recipe.parallel.nodes
    if not recipe.run.check_gpus:
        return
    try:
        found = gpus.query()
    except ModuleNotFoundError as error:
        raise RecipeError(
            "run.check_gpus", "nvidia-ml-py is not installed: install it, or set this to false"
        ) from error
    except OSError as error:
        raise RecipeError("run.check_gpus", f"{error}; false starts without looking") from error
    if ranks > len(found):
        raise RecipeError("parallel.tensor", f"{ranks} ranks on a node, and {len(found)} GPUs are visible")
    needed = state_bytes(recipe)
    for gpu in found[:ranks]:
        if gpu.processes:
            pids = ", ".join(map(str, gpu.processes))
            raise RecipeError("run.device", f"{gpu.name} is in use by process {pids}: end it, or CUDA_VISIBLE_DEVICES")
        if gpu.free_bytes < needed:
            raise RecipeError(
                "parallel.tensor",
                f"weights and states take {needed / 2**30:.1f} GiB a rank, and {gpu.name} has "
                f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB free",
            )


def check(recipe: Recipe) -> str:
    """All checks, the cheap ones first.

    Returns:
        The device kind that the run will use, "cpu" or "cuda".

    Raises:
        RecipeError: the first thing found.
    """
    check_values(recipe)
    check_degrees(recipe)
    check_sizes(recipe)
    check_megatron(recipe)
    check_data(recipe)
    check_tokenizer(recipe)
    check_optimizer(recipe)
    check_folders(recipe)
    device = resolve_device(recipe)
    check_capture(recipe, device)
    if device == "cuda":
        check_gpus(recipe)
    elif recipe.model.transformer_engine == "always":
        raise RecipeError("model.transformer_engine", "Transformer Engine has no CPU path: auto or never")
    if recipe.optimizer.use_forge:
        check_backend(recipe, device)
    return device
