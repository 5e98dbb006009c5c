"""Which weights of a Megatron model FORGE steps, and the swap of their modules' classes in place.

Works on an already built model, so that any layer spec, and ``output_layer``, which is in no spec, are
reached. A weight whose local gradient is not complete, or whose gradient Megatron treats on its own,
stays with Megatron's optimizer; :class:`Conversion` keeps the reason.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

from forge_megatron.formats import WEIGHT_DTYPES
from forge_megatron.linear import has_gradient_hook
from forge_megatron.megatron.domains import is_expert
from forge_megatron.megatron.experts import ExpertLinear, GroupedExperts
from forge_megatron.megatron.layers import (
    ForgeColumnParallelLinear,
    ForgeRowParallelLinear,
    ForgeVocabParallelEmbedding,
)

_SWAP = {
    ColumnParallelLinear: ForgeColumnParallelLinear,
    RowParallelLinear: ForgeRowParallelLinear,
    VocabParallelEmbedding: ForgeVocabParallelEmbedding,
    ExpertLinear: ExpertLinear,
}
# megatron-core's own experts in one tensor, which other packages multiply.
_FOREIGN_EXPERTS = ("GroupedMLP", "TEGroupedMLP")
_ATTRIBUTE = "forge_conversion"


@dataclass
class Conversion:
    """What FORGE takes of one model chunk.

    Attributes:
        owned: global parameter name to parameter, for the weights that FORGE steps.
        kept: global parameter name to the reason why Megatron's optimizer steps it.
    """

    owned: dict[str, nn.Parameter] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def exclude(self) -> None:
        """Before DDP is built: ``requires_grad`` is the only test that it, and Megatron's optimizer, make."""
        for weight in self.owned.values():
            weight.requires_grad_(False)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def global_names(model: nn.Module) -> dict[str, str]:
    """Parameter names with the layer's and the expert's number in the whole model, whatever this rank has of it.

    Returns:
        Name in ``model.named_parameters()`` to its name with ``layers.<global number>``,
        ``local_experts.<global number>`` and, of experts in one tensor, ``experts.<first>-<last number>``.
    """
    numbers: dict[str, int | str] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number"):
            numbers[name] = module.layer_number - 1
        if isinstance(module, SequentialMLP):
            first = module.ep_group.rank() * module.num_local_experts
            numbers.update((f"{name}.local_experts.{i}", first + i) for i in range(module.num_local_experts))
        if isinstance(module, GroupedExperts):
            first = module.ep_group.rank() * module.num_local_experts
            numbers[name] = f"{name.rpartition('.')[2]}.{first}-{first + module.num_local_experts - 1}"
    names = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        prefixes = itertools.accumulate(parts, "{}.{}".format)
        names[name] = ".".join(str(numbers.get(prefix, part)) for prefix, part in zip(prefixes, parts, strict=True))
    return names


def conversion_of(model: nn.Module) -> Conversion | None:
    """What :func:`convert` found in this model, or None if it was never converted."""
    return getattr(unwrap(model), _ATTRIBUTE, None)


def _reason_kept(module: nn.Module, weight: nn.Parameter) -> str | None:
    """None if FORGE steps ``weight`` in the backward of ``module``."""
    if type(module) not in _SWAP and type(module) not in _SWAP.values():
        return f"{type(module).__name__} is not a linear or an embedding that FORGE knows"
    in_experts = getattr(module, "is_expert", False)
    if is_expert(weight) and not in_experts:
        return "its data-parallel group is not the dense one"
    if in_experts and not is_expert(weight) and module.tp_group.size() != _tensor_parallel_size():
        return "expert weight whose tensor parallelism is not that of dense weights: its gradient is a partial sum"
    if type(weight) is not nn.Parameter:
        return f"the weight is a {type(weight).__name__}"
    if getattr(weight, "is_gtp_weight_remat", False):
        return "sharded once more by gtp_weight_remat"
    if getattr(weight, "grad_norm_group", None) is not None:
        return f"clipped by a norm of its own ({weight.grad_norm_group})"
    if getattr(weight, "shared_embedding", False):
        return "tied over pipeline stages: Megatron sums its two gradients"
    if weight.dtype not in WEIGHT_DTYPES:
        return f"dtype {weight.dtype}"
    if has_gradient_hook(weight):
        return "a gradient hook is registered on the weight"
    return None


def _tensor_parallel_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def _of_foreign_experts(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    found = [m for m in model.modules() if type(m).__name__ in _FOREIGN_EXPERTS]
    return [(type(module).__name__, weight) for module in found for weight in module.parameters()]


def _multiplied_weight(model: nn.Module, module: nn.Module) -> nn.Parameter | None:
    """The weight that the module multiplies with; a tied head multiplies with the embedding's."""
    if module.weight is not None:
        return module.weight
    if module is getattr(model, "output_layer", None) and getattr(model, "pre_process", False):
        return model.shared_embedding_or_output_weight()
    return None


def convert(model: nn.Module) -> Conversion:
    """Swaps the classes of the model's Megatron linears and embedding in place, and says which weights FORGE can step.

    Nothing trains differently yet: a swapped linear is Megatron's until an optimizer owns its weight.
    Frozen weights (``requires_grad`` False) are left alone.

    Args:
        model: one model chunk, before Float16Module and DDP.

    Returns:
        The conversion, also kept on the model for :func:`conversion_of`. A second call returns the first.
    """
    model = unwrap(model)
    known = conversion_of(model)
    if known is not None:
        return known
    names = global_names(model)
    by_identity = {id(p): names[name] for name, p in model.named_parameters()}
    conversion = Conversion()
    for module in model.modules():
        if not isinstance(module, tuple(_SWAP)):
            continue
        weight = _multiplied_weight(model, module)
        if weight is None or not weight.requires_grad:
            continue
        reason = _reason_kept(module, weight)
        if reason is not None:
            conversion.kept[by_identity[id(weight)]] = reason
            continue
        module.__class__ = _SWAP.get(type(module), type(module))
        conversion.owned[by_identity[id(weight)]] = weight
    for weight in conversion.owned.values():
        conversion.kept.pop(by_identity[id(weight)], None)
    for kind, weight in _of_foreign_experts(model):
        if weight.requires_grad and by_identity[id(weight)] not in conversion.owned:
            conversion.kept[by_identity[id(weight)]] = (
                f"experts of {kind}; those of forge_megatron.megatron.experts, which "
                "get_gpt_layer_forge_spec has with moe_grouped_gemm, are stepped in backward"
            )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and names[name] not in conversion.owned:
            conversion.kept.setdefault(names[name], "not the weight of a tensor-parallel linear or embedding")
    setattr(model, _ATTRIBUTE, conversion)
    return conversion
