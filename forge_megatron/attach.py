"""The front door for a plain PyTorch model."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from forge_megatron.codes import store_as_codes
from forge_megatron.coordinator import find_shards, wholes_of
from forge_megatron.formats import in_memory
from forge_megatron.hidden import with_adamw
from forge_megatron.kernels import is_sharded
from forge_megatron.linear import ForgeGroupedLinear, ForgeLinear, GroupedLinear
from forge_megatron.linear.attached import Attached, fuse
from forge_megatron.linear.ownership import reason_experts_not_fused, reason_not_fused, reason_routed_not_fused
from forge_megatron.linear.routed import ForgeRoutedExperts, weights_of_routed
from forge_megatron.optimizer import ForgeOptimizer
from forge_megatron.vocab import ForgeEmbedding
from forge_megatron.vocab import embedding as vocab_embedding
from forge_megatron.wrapped import stay_beside_ddp

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def attach(
    model: nn.Module,
    rule: str = "adamw",
    params: Iterable | None = None,
    *,
    adamw: Mapping | None = None,
    **options,
) -> ForgeOptimizer:
    """Makes the linear layers and embeddings of ``model`` step their weights inside backward.

    The model must already be on its device and in its dtype. Their weights are owned: ``.grad`` stays None.
    Every other parameter, and a weight that something reads without calling its module, is stepped from
    ``.grad`` at ``step()`` by the same rule. In a model that ``fully_shard`` has sharded, every parameter is
    stepped inside backward where its reduced shard arrives; attach shards nothing itself.

    Args:
        model: any module.
        rule: a rule's name, of ``forge_megatron.rules.available()``.
        params: parameters or groups as ``torch.optim`` takes them; default: every parameter. One that is
            frozen has no states; they are made when it is unfrozen.
        adamw: hyperparameters, with an ``lr`` of its own, of the AdamW that steps everything but hidden
            matrices: embeddings, the head, norms, biases. For Muon and other rules of matrices.
        options: of :class:`ForgeOptimizer`; ``lr`` is required. With ``process_group=`` every rank gets the first
            rank's parameters and buffers.

    Returns:
        The optimizer: ``loss.backward(); optimizer.step(); optimizer.zero_grad()``.

    Raises:
        ValueError: a parameter on the meta device, two parameters in the same memory, a bad value.
        TypeError: a hyperparameter that the rule does not have.
        NotImplementedError: an option that is not built yet.
    """
    names = _names(model)
    if params is None:
        params = list(names)
    _warn_untied(model)
    shards = find_shards(model, names)
    groups = _named_groups(params, names)
    if adamw is not None:
        groups = with_adamw(model, groups, adamw)
    optimizer = ForgeOptimizer(groups, rule, shards=shards, wholes=wholes_of(names) if shards else None, **options)
    if store_as_codes(model, optimizer, options):
        optimizer.register()
    try:
        own_weights(model, optimizer)
    except Exception:
        optimizer.detach()
        raise
    optimizer.watch()
    tensors = itertools.chain(model.parameters(), model.buffers())
    optimizer.synchronize([part for tensor in tensors for part in in_memory(tensor)])
    if options.get("process_group") is not None:
        stay_beside_ddp(model, optimizer)
    return optimizer


def own_weights(model: nn.Module, optimizer: ForgeOptimizer) -> None:
    """Gives ``optimizer`` every weight of a linear or embedding that it can step, and the reason for the others.

    An embedding that cannot be owned leaves its weight to a head that shares it, which then waits for both.
    """
    weights: dict[Tensor, list[tuple[nn.Module, str, type[Attached]]]] = {}
    read: dict[Tensor, str] = {}
    for module in model.modules():
        for name, forge, why_not in _fusable(module):
            weight = module._parameters.get(name)
            if weight is None or weight not in optimizer.names or is_sharded(weight):
                continue
            reason = why_not()
            if reason is None:
                weights.setdefault(weight, []).append((module, name, forge))
            else:
                (read if forge is ForgeEmbedding else optimizer.reasons)[weight] = reason
    for weight, modules in weights.items():
        if weight in optimizer.reasons or weight in optimizer.owned:
            continue
        owned = optimizer.own(weight)
        for module, name, forge in modules:
            fuse(module, owned, forge, name)
        optimizer.fused_modules.extend(module for module, _, _ in modules)
    optimizer.reasons.update((weight, reason) for weight, reason in read.items() if weight not in optimizer.owned)


def _fusable(module: nn.Module) -> list[tuple[str, type[Attached], Callable[[], str | None]]]:
    """Names of a module's weights, the class that steps each in its backward, and what says why it may not."""
    if isinstance(module, nn.Embedding):
        return [("weight", ForgeEmbedding, partial(vocab_embedding.reason_not_fused, module))]
    if isinstance(module, nn.Linear):
        return [("weight", ForgeLinear, partial(reason_not_fused, module))]
    if isinstance(module, GroupedLinear):
        return [("weight", ForgeGroupedLinear, partial(reason_experts_not_fused, module))]
    routed = weights_of_routed(module)
    return [(name, ForgeRoutedExperts, partial(reason_routed_not_fused, module, name)) for name in routed]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of the trainable parameters: matrices are decayed, biases, norms and other vectors are not.

    Embeddings are matrices and are decayed.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [pair for pair in trainable if pair[1].dim() >= 2], "weight_decay": weight_decay},
        {"params": [pair for pair in trainable if pair[1].dim() < 2], "weight_decay": 0.0},
    ]


def _named_groups(params: Iterable, names: dict[Tensor, str]) -> list[dict]:
    """Param groups of ``(name, parameter)`` pairs, from whatever ``torch.optim`` accepts."""
    if isinstance(params, Tensor):
        raise TypeError("params is a Tensor; give an iterable of parameters or groups")
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    strangers = itertools.count()
    named = []
    for group in groups:
        members = group["params"]
        if isinstance(members, set):
            raise TypeError("a group's params are a set, whose order changes between runs; give a list")
        members = [members] if isinstance(members, Tensor) else list(members)
        pairs = [
            m if isinstance(m, tuple) else (names[m] if m in names else f"unnamed.{next(strangers)}", m)
            for m in members
        ]
        # torch reads the names off the pairs, where there are any.
        named.append({**group, "params": pairs} if pairs else {**group, "params": [], "param_names": []})
    if not any(group["params"] for group in named):
        raise ValueError("the model has no parameters")
    return named


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Each parameter's name without wrapper prefixes, which a checkpoint of another run may not have."""
    names = {p: name for name, p in model.named_parameters()}
    short = {p: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for p, name in names.items()}
    return short if len(set(short.values())) == len(names) else names


def _warn_untied(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is not embedding.weight:
        warnings.warn(
            "config.tie_word_embeddings is set, but head and embedding are two parameters (a model that was "
            "materialised from the meta device loses its ties); they are trained and saved as two. Call "
            "model.tie_weights() before attach to tie them",
            stacklevel=3,
        )
