"""Which weights FORGE can step inside backward, and the reason why not for the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from forge_megatron.formats import WEIGHT_DTYPES, Fp8Weight
from forge_megatron.kernels import local
from forge_megatron.linear.grouped import ForgeGroupedLinear, GroupedLinear
from forge_megatron.linear.hooks import has_gradient_hook
from forge_megatron.linear.modules import ForgeLinear
from forge_megatron.linear.routed import TORCH_IMPLEMENTATIONS, ForgeRoutedExperts


def reason_not_fused(module: nn.Module) -> str | None:
    """None if the weight of ``module`` can be stepped inside its backward."""
    if not isinstance(module, nn.Linear):
        return "not the weight of a linear layer"
    # A ForgeLinear whose optimizer was deleted is attached again.
    if type(module).forward not in (nn.Linear.forward, ForgeLinear.forward):
        return f"{type(module).__name__} has a forward of its own"
    return reason_not_owned(module)


def reason_experts_not_fused(module: GroupedLinear) -> str | None:
    """None if the weight of all experts of ``module`` can be stepped inside its backward."""
    if type(module).forward not in (GroupedLinear.forward, ForgeGroupedLinear.forward):
        return f"{type(module).__name__} has a forward of its own"
    if not module.weight.is_contiguous():
        return "experts in one tensor, which is not contiguous"
    return reason_not_owned(module)


def reason_routed_not_fused(module: nn.Module, name: str) -> str | None:
    """None if the weight ``name`` of a module of which ``weights_of_routed`` knows it can be stepped in backward."""
    kind = type(module).__name__
    # What transformers' decorator puts around an experts' forward; a class below may have another.
    if not (isinstance(module, ForgeRoutedExperts) or hasattr(type(module).forward, "__wrapped__")):
        return f"{kind} has a forward of its own"
    implementation = getattr(module.config, "_experts_implementation", None)
    if implementation not in TORCH_IMPLEMENTATIONS:
        return f"{kind} multiplies by experts_implementation={implementation!r}"
    if module.has_post_expert_norm:
        return f"{kind} normalises after each expert"
    if module._is_expert_parallel:
        return f"{kind} has its experts on several ranks"
    if not getattr(module, name).is_contiguous():
        return "experts in one tensor, which is not contiguous"
    return reason_not_owned(module, name)


def reason_not_owned(module: nn.Module, name: str = "weight") -> str | None:
    """None if this weight of ``module`` is a parameter that can be stepped where its module is differentiated."""
    if parametrize.is_parametrized(module):
        return "parametrized: the parameter is not the matrix that is multiplied"
    weight = module._parameters.get(name)
    if weight is None:
        return "the weight is not a parameter (weight_norm, pruning)"
    if type(weight) not in (nn.Parameter, Fp8Weight):
        return f"the weight is a {type(weight).__name__}"
    if weight.dtype not in WEIGHT_DTYPES:
        return f"dtype {weight.dtype}"
    if has_gradient_hook(weight):
        return "a gradient hook is registered on the weight"
    return None


def expect_steppable(name: str, p: Tensor) -> None:
    """Raises unless ``p`` is materialised.

    Raises:
        ValueError: on the meta device, or a lazy module's parameter.
    """
    if p.is_meta:
        raise ValueError(f"{name} is on the meta device; materialise the model, then attach")
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet; run a forward of the lazy module, then attach")


def expect_separate_storage(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises if two different parameters share memory, or the counter that tells when they were written.

    Raises:
        ValueError: names both parameters. One parameter under two names is a tied weight, and fine.
    """
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, tensor in ((name, p.codes if isinstance(p, Fp8Weight) else local(p)) for name, p in named):
        if tensor.numel() == 0:
            continue
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        end = start + (reach + 1) * tensor.element_size()
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, name, tensor))
    for shared in spans.values():
        shared.sort(key=lambda span: span[:2])
        for (_, end, first, one), (start, _, second, other) in itertools.pairwise(shared):
            if one is other:
                raise ValueError(f"{first} is given twice; it would be stepped twice")
            if start < end:
                raise ValueError(
                    f"{first} and {second} are different parameters in the same memory, which would be stepped "
                    "twice; tie them by assigning one Parameter object to both modules"
                )
            if _share_version(one, other):
                raise ValueError(
                    f"{first} and {second} are views of one tensor and share its version counter: an update of "
                    "one would look like a write to the other; set .data of two parameters to the views instead"
                )


def _share_version(one: Tensor, other: Tensor) -> bool:
    before = other._version
    torch.autograd.graph.increment_version(one)
    return other._version != before
