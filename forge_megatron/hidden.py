"""Which parameters are hidden matrices. Rules of matrices leave embeddings, the head and vectors to AdamW."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from forge_megatron.formats import FORMAT_KEYS

#: What libraries call the module that turns the last hidden state into logits.
HEADS = frozenset({"lm_head", "output_layer", "embed_out", "head", "classifier", "score"})


def with_adamw(model: nn.Module, groups: list[dict], adamw: Mapping) -> list[dict]:
    """Each group cut in two: its hidden matrices as they are, and the rest with ``rule="adamw"``.

    A hidden matrix is a parameter of two dimensions that is neither an embedding's nor the head's. The head is
    what ``model.get_output_embeddings()`` returns, and any module whose name ends in one of :data:`HEADS`.

    Args:
        model: whose parameters they are.
        groups: of ``(name, parameter)`` pairs; one that names a rule of its own stays whole. AdamW takes over a
            group's weight decay and formats.
        adamw: AdamW's hyperparameters, with ``lr``.

    Raises:
        TypeError: ``adamw`` has no ``lr``.
        ValueError: nothing is left for AdamW, or no hidden matrix is there.
    """
    if "lr" not in adamw:
        raise TypeError("adamw= needs an lr of its own: adamw=dict(lr=...)")
    others = _embeddings_and_heads(model)
    cut: list[dict] = []
    for group in groups:
        if "rule" in group:
            cut.append(group)
            continue
        hidden = [pair for pair in group["params"] if pair[1].dim() == 2 and pair[1] not in others]
        rest = [pair for pair in group["params"] if not (pair[1].dim() == 2 and pair[1] not in others)]
        kept = {name: value for name, value in group.items() if name in ("weight_decay", "maximize", *FORMAT_KEYS)}
        cut += [{**group, "params": hidden}] if hidden else []
        cut += [{**kept, **adamw, "rule": "adamw", "params": rest}] if rest else []
    if not any("rule" in group for group in cut):
        raise ValueError("adamw= was given, and every parameter is a hidden matrix; leave it out")
    if all("rule" in group for group in cut):
        raise ValueError("no parameter is a hidden matrix; attach with rule 'adamw'")
    return cut


def _embeddings_and_heads(model: nn.Module) -> set[Tensor]:
    found = {
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        or (name.rpartition(".")[2] in HEADS and isinstance(getattr(module, "weight", None), Tensor))
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if head is None else {*found, head.weight}
