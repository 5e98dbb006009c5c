"""How a cell's model lies over Megatron's ranks, and the recipe of it that the trainer's own code builds."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from launch import config, preflight
from launch.bench.arm import BETAS, EPS, Settings
from launch.bench.shapes import Shape

DEGREES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert", "dp": "data"}
FLAGS = {"sp": {"sequence": True}, "a2a": {"context_comm": "a2a"}, "p2p": {"context_comm": "p2p"}}


@dataclass(frozen=True)
class Layout:
    """What a cell through Megatron has beside its shape and batch.

    Attributes:
        parallel: the degrees.
        micro_batches: of an optimizer step.
        experts: of each layer, in place of its MLP; 0: dense.
        recompute: every layer's forward again in its backward.
    """

    parallel: config.Parallel
    micro_batches: int = 1
    experts: int = 0
    recompute: bool = False


def parse(text: str, world_size: int) -> config.Parallel:
    """Degrees such as ``tp2-sp`` or ``tp2-cp2``; the data-parallel ranks are what is left of ``world_size``.

    ``sp`` is sequence parallelism, ``a2a`` and ``p2p`` context parallelism by all-to-all and in a ring rather than by
    all-gather, ``ep`` lies over the data-parallel ranks, ``dp`` may be said.

    Raises:
        ValueError: not of this form, or not of as many ranks.
    """
    found: dict = {}
    for part in text.split("-"):
        named = re.fullmatch(r"([a-z]+)([0-9]+)", part)
        if part in FLAGS:
            found |= FLAGS[part]
        elif named and named[1] in DEGREES and int(named[2]) > 0:
            found[DEGREES[named[1]]] = int(named[2])
        else:
            known = [f"{name}N" for name in DEGREES] + list(FLAGS)
            raise ValueError(f"parallel: {part!r} in {text!r} is none of {', '.join(known)}")
    said = found.pop("data", None)
    alone = config.Parallel(**found)
    of_model = alone.tensor * alone.pipeline * alone.context
    if world_size % of_model or said not in (None, world_size // of_model):
        raise ValueError(f"parallel: {text!r} is not of world_size={world_size} ranks")
    return replace(alone, data=world_size // of_model)


def recipe(
    shape: Shape, layout: Layout, batch: int, sequence: int, settings: Settings, device: str, changes: dict
) -> config.Recipe:
    """The recipe of a cell; ``changes`` are an arm's, by ``section.key``.

    Raises:
        launch.config.RecipeError: the first key that cannot be, as the trainer's preflight finds it.
    """
    gpt = shape.kind == "gpt"
    parallel = layout.parallel
    made = config.Recipe(
        model=config.Model(
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.intermediate_size,
            num_experts=layout.experts or None,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim,
            normalization="LayerNorm" if gpt else "RMSNorm",
            activation="gelu" if gpt else "swiglu",
            # Experts with biases are not built.
            bias=gpt and not layout.experts,
            qk_norm=shape.kind == "qwen3",
            tied_head=shape.tie_word_embeddings,
            vocab_size=shape.vocab_size,
            dtype=shape.dtype,
            recompute="full" if layout.recompute else "none",
            cpu_initialization=device == "cpu",
            transformer_engine="never",
        ),
        parallel=parallel,
        data=config.Data(sequence_length=sequence),
        batch=config.Batch(micro=batch, total=batch * parallel.data * layout.micro_batches),
        optimizer=config.Optimizer(
            lr=settings.lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=settings.weight_decay,
            clip_grad=0.0,
            decay_style="constant",
        ),
        run=config.Run(dir="", steps=1, device="cpu" if device == "cpu" else "cuda"),
    )
    sections: dict[str, dict] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    made = replace(made, **{name: replace(getattr(made, name), **values) for name, values in sections.items()})
    for check in (preflight.check_values, preflight.check_degrees, preflight.check_sizes, preflight.check_optimizer):
        check(made)
    return made


def small(shape: Shape, layout: Layout) -> tuple[Shape, Layout]:
    """What the check before a cell is made with: a model of two experts a rank, and a layer a stage at least."""
    parallel = layout.parallel
    heads = max(shape.num_attention_heads, parallel.tensor * parallel.context)
    layers = max(shape.num_hidden_layers, parallel.pipeline * (parallel.virtual_pipeline or 1))
    shape = replace(shape, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=layers)
    return shape, replace(layout, experts=2 * parallel.expert if layout.experts else 0, recompute=False)
