"""A small language model with everything owned, and which tensors are resident that are neither weights nor states."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_megatron.vocab import linear_cross_entropy

VOCABULARY, WIDTH, TOKENS = 1000, 64, 16


class LanguageModel(nn.Module):
    """Embedding, two linears, head; ``forward`` returns the loss of the next token."""

    def __init__(self, tied: bool, fused: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids[:-1])
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        if self.fused:
            return linear_cross_entropy(h, self.head, ids[1:])
        return nn.functional.cross_entropy(self.head(h), ids[1:])


def ids(seed: int, device="cpu") -> Tensor:
    return torch.randint(VOCABULARY, (TOKENS + 1,), generator=torch.Generator().manual_seed(seed)).to(device)


def tensors() -> list[Tensor]:
    """Every tensor with memory that Python can reach, and their gradients."""
    gc.collect()
    # A compiler's tensors are of classes of their own.
    found = [object for object in gc.get_objects() if type(object) in (Tensor, nn.Parameter) and not object.is_meta]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def storages(found: list[Tensor]) -> dict[int, Tensor]:
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in found if tensor.numel()}


def resident(before: dict[int, Tensor], elements: int) -> list[str]:
    """What takes ``elements`` or more and was not there ``before``: its shape, dtype, and what is known of it."""
    names = []
    for place, tensor in storages(tensors()).items():
        if place not in before and tensor.untyped_storage().nbytes() >= elements * tensor.element_size():
            what = "a gradient" if any(tensor is old.grad for old in before.values() if old.is_leaf) else "a tensor"
            names.append(f"{what} {list(tensor.shape)} {tensor.dtype} {tensor.grad_fn or ''}".strip())
    return names


class Allocated(TorchDispatchMode):
    """Notes the storages of ``elements`` or more that operations write to and that were not there before."""

    def __init__(self, before: dict[int, Tensor], elements: int):
        super().__init__()
        self.before, self.elements = before, elements
        self.large: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.before:
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                if held >= self.elements:
                    self.large.add(f"{function} {list(tensor.shape)} {tensor.dtype}")
        return out
