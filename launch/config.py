"""Recipes: OmegaConf structured configs, one YAML a run, unknown keys are errors."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


class RecipeError(ValueError):
    """A recipe that cannot run: one line, beginning with the key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {' '.join(problem.split())}")
        self.key = key


@dataclass(frozen=True)
class Model:
    num_layers: int = MISSING
    hidden_size: int = MISSING
    ffn_hidden_size: int = MISSING
    num_experts: int | None = None  # of each layer, Megatron's num_moe_experts; None: one dense MLP
    expert_topk: int = 2  # experts that a token goes to, Megatron's moe_router_topk
    expert_ffn_hidden_size: int | None = None  # Megatron's moe_ffn_hidden_size; None: ffn_hidden_size
    expert_grouped: bool = False  # the experts of a linear in one tensor, Megatron's moe_grouped_gemm
    expert_aux_loss: float = 0.0  # weight of the load-balancing loss, Megatron's moe_aux_loss_coeff
    num_attention_heads: int = MISSING
    num_query_groups: int | None = None  # None: multi-head attention
    kv_channels: int | None = None  # head dimension; None: hidden_size / num_attention_heads
    position_embedding: str = "rope"  # or learned_absolute
    rotary_base: int = 10000
    normalization: str = "RMSNorm"  # or LayerNorm
    norm_epsilon: float = 1e-5
    activation: str = "swiglu"  # or gelu
    bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    vocab_size: int | None = None  # None: the tokenizer's; padded to a multiple of 128
    dropout: float = 0.0
    init_std: float = 0.02
    dtype: str = "fp32"  # or bf16
    recompute: str = "none"  # or selective, full
    cpu_initialization: bool = True  # initial weights do not depend on the parallel degrees
    transformer_engine: str = "auto"  # where installed and on a GPU; or never, always
    fusions: bool = False  # Megatron's torch.compile fusions of bias, activation and dropout


@dataclass(frozen=True)
class Parallel:
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1  # stages
    # Chunks of layers a stage (Megatron's virtual_pipeline_model_parallel_size), interleaved; None: one, by 1F1B.
    virtual_pipeline: int | None = None
    context: int = 1
    context_comm: str = "all_gather"  # or a2a, p2p: a ring (Megatron's cp_comm_type)
    expert: int = 1  # over the data- and context-parallel ranks: it takes none of its own
    data: int = 1
    distributed_optimizer: bool = False  # each data-parallel rank has a part of the optimizer's states
    nodes: int = 1


@dataclass(frozen=True)
class Data:
    tokenizer: str = "byte"  # or a Hugging Face name or folder
    train: list[str] = field(default_factory=list)  # prefixes of indexed datasets
    train_weights: list[float] | None = None
    valid: list[str] = field(default_factory=list)
    synthetic: bool = False  # Megatron's mock dataset instead of train and valid
    sequence_length: int = MISSING
    samples: int | None = None  # the horizon that is shuffled; None: all that the run reads
    cache: str | None = None  # folder of the shuffled indices; None: run.dir/cache
    workers: int = 0  # loader processes a rank


@dataclass(frozen=True)
class Batch:
    micro: int = 1  # samples a rank in one forward
    total: int = MISSING  # samples an optimizer step, over all ranks
    per_token_loss: bool = False  # divide by the step's tokens rather than average micro-batches


@dataclass(frozen=True)
class Optimizer:
    use_forge: bool = True
    rule: str = "adamw"
    recipe: str | None = None  # state format and weight store, see forge_megatron.formats
    backend: str = "auto"
    update: str = "auto"  # in backward unless something must wait; or backward, step
    accumulation_dtype: str = "fp32"  # of a 16-bit weight's sum of micro-batches with forge; or bf16
    tune: bool = False  # the kernels' configurations for this run's tokens, at set-up: see forge_megatron.tune
    fused_head: bool = False  # head and loss in one with forge: the logits never exist whole
    lr: float = MISSING
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad: float = 1.0  # global norm; 0: no clipping
    warmup_steps: int = 0
    decay_style: str = "cosine"  # or linear, constant
    decay_steps: int | None = None  # None: run.steps


@dataclass(frozen=True)
class Validation:
    every: int = 0  # steps; 0: only after the last step
    samples: int = 64


@dataclass(frozen=True)
class Logging:
    every: int = 1  # steps between progress lines; the JSONL has every step
    tensorboard: bool = True


@dataclass(frozen=True)
class Checkpoint:
    save: bool = True
    every: int = 0  # steps; 0: only after the last step
    keep: int = 2
    resume: bool = True
    self_test: bool = True  # save, read back and compare after the first step
    override_schedule: bool = False  # resume with this recipe's schedule, not the saved one


@dataclass(frozen=True)
class Run:
    dir: str = MISSING
    steps: int = MISSING
    seed: int = 1234
    deterministic: bool = False
    capture: bool = False  # the step as one CUDA graph: one GPU, with forge
    reorder: bool = False  # samples of a step and hidden channels in another order: only roundings change
    device: str = "auto"  # or cpu, cuda
    check_gpus: bool = True  # ask NVML whether the GPUs are free before starting
    timeout_minutes: float = 10.0  # of a collective


@dataclass(frozen=True)
class Recipe:
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    validation: Validation = field(default_factory=Validation)
    logging: Logging = field(default_factory=Logging)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)

    def get(self, key: str) -> Any:
        """The value of ``section.name``."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    @property
    def world_size(self) -> int:
        p = self.parallel
        return p.tensor * p.pipeline * p.context * p.data

    @property
    def micro_batches(self) -> int:
        return self.batch.total // (self.batch.micro * self.parallel.data)


def find(name: str, folder: Path = RECIPES) -> Path:
    """The recipe's file: a path, or a name in ``folder``."""
    for candidate in (Path(name), folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
    raise RecipeError("RECIPE", f"no file {name!r}, and {folder.name}/ has: {known}")


def load(name: str, overrides: list[str] | None = None, kind: type = Recipe, folder: Path = RECIPES) -> Any:
    """Read a recipe and apply ``key=value`` overrides.

    Args:
        name: as :func:`find` takes it.
        overrides: each ``key=value``.
        kind: the dataclass that says what a file may hold.
        folder: where names are looked up.

    Returns:
        A ``kind``.

    Raises:
        RecipeError: an unknown key, a wrong type, or a required key that is not given.
    """
    schema = OmegaConf.structured(kind)
    path = find(name, folder)
    try:
        layers = [OmegaConf.load(path)]
    except Exception as error:  # YAML's errors have no common base that OmegaConf promises
        raise RecipeError(str(path), f"not readable as YAML: {error}") from error
    for override in overrides or []:
        if "=" not in override:
            raise RecipeError(override, "an override is key=value, for example run.steps=100")
        try:
            layers.append(OmegaConf.from_dotlist([override]))
        except Exception as error:  # as above
            raise RecipeError(override, f"not readable: {error}") from error
    for layer in layers:
        plain = OmegaConf.to_container(layer)
        if not isinstance(plain, dict):
            raise RecipeError(str(path), "a recipe is a mapping of sections")
        _check_known(plain, kind, "")
        try:
            schema = OmegaConf.merge(schema, _at_home(plain))
        except OmegaConfBaseException as error:
            raise _naming_key(error) from error
    try:
        missing = sorted(OmegaConf.missing_keys(schema))
        if missing:
            raise RecipeError(missing[0], f"required, and not given in {path}")
        return OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        raise _naming_key(error) from error


def _at_home(node: Any) -> Any:
    """``~/`` of a path made the user's folder: a shell does so at the beginning of a word, not after ``key=``."""
    if isinstance(node, dict):
        return {key: _at_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_at_home(value) for value in node]
    return str(Path(node).expanduser()) if isinstance(node, str) and node.startswith("~/") else node


def _naming_key(error: OmegaConfBaseException) -> RecipeError:
    return RecipeError(getattr(error, "full_key", None) or "recipe", str(error).splitlines()[0])


def _check_known(layer: Any, section: type, prefix: str) -> None:
    hints = typing.get_type_hints(section)
    for key, value in layer.items():
        full = f"{prefix}{key}"
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(hints)}"
            raise RecipeError(full, f"unknown key; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise RecipeError(full, f"a section, with keys such as {full}.{_first(hints[key])}")
            _check_known(value, hints[key], f"{full}.")
        elif _is_list(hints[key]) and isinstance(value, (str, int, float)) and "${" not in str(value):
            raise RecipeError(full, f"{value!r} is no list: give {full}=[{value}]")


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(part) is list for part in (hint, *typing.get_args(hint)))


def _first(section: type) -> str:
    return dataclasses.fields(section)[0].name


def to_yaml(recipe: Recipe) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))
