"""Steps of low-rank rules from a gradient's factors: the gradient itself is never formed.

``R = G V^T`` is ``dY^T (X V^T)``. Adam's direction N of R, projected back, is ``(N^T)^T V``: the product that the
fused kernel forms tile by tile, with r in the place of the tokens, and steps the weight with.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..rules.projection import Projection, adam
from . import fused
from .backend import WGRAD_ONLY
from .lookups import Lookups, is_lookup
from .slot import Segment, Slot

#: Columns beyond the rank, and power iterations, of the range finder (Halko et al., arXiv:0909.4061, algorithm 4.4).
OVERSAMPLING = 8
POWER_ITERATIONS = 2

#: Largest growth of APOLLO's update from one step to the next.
GROWTH = 1.01


@dataclass(frozen=True)
class Gradient:
    """``G = sum of dY^T X + accumulator``, which is read through products with small matrices.

    Attributes:
        segments: factors of its parts; where ids stand for dY, each names a row.
        accumulator: fp32 or bf16 ``[O, I]``, or None.
        shape: ``[O, I]``.
    """

    segments: Sequence[Segment]
    accumulator: Tensor | None
    shape: torch.Size

    @classmethod
    def of(cls, segments: Sequence[Segment], accumulator: Tensor | None, shape: torch.Size) -> Gradient:
        """Without segments of no tokens, and with every id in range."""
        kept = []
        for dy, x in segments:
            if is_lookup((dy, x)):
                # Ids outside are no row (padding_idx): any row, to which nothing is added.
                inside = (dy >= 0) & (dy < shape[0])
                dy, x = dy.clamp(0, shape[0] - 1), x.masked_fill(~inside.unsqueeze(1), 0.0)
            if dy.shape[0]:
                kept.append((dy, x))
        return cls(kept, accumulator, shape)

    def right(self, basis: Tensor) -> Tensor:
        """``G @ basis``, fp32, for ``[I, k]``."""
        product = basis.new_zeros(self.shape[0], basis.shape[1])
        if self.accumulator is not None:
            product.addmm_(self.accumulator.float(), basis)
        for dy, x in self.segments:
            _add(product, dy, x.float() @ basis)
        return product

    def left(self, basis: Tensor) -> Tensor:
        """``basis @ G``, fp32, for ``[k, O]``."""
        product = basis.new_zeros(basis.shape[0], self.shape[1])
        if self.accumulator is not None:
            product.addmm_(basis, self.accumulator.float())
        for dy, x in self.segments:
            product.addmm_(basis[:, dy] if is_lookup((dy, x)) else basis @ dy.float().t(), x.float())
        return product

    def dense(self, like: Tensor) -> Tensor:
        """G itself, fp32, on the device of ``like``."""
        total = like.new_zeros(self.shape)
        if self.accumulator is not None:
            total += self.accumulator
        for dy, x in self.segments:
            _add(total, dy, x.float())
        return total


def _add(product: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add ``dY^T X`` of one segment to ``product``, without atomics."""
    if is_lookup((dy, x)):
        Lookups.of([(dy, x)]).add_to(product, 0)
    else:
        product.addmm_(dy.float().t(), x)


def step(slot: Slot, grad: Tensor, multiplier: Tensor | None, backend: str) -> None:
    """Step one matrix from a gradient that is in memory."""
    accumulator = grad.float() if grad.dtype is torch.float16 else grad
    wgrad_step(slot, (), accumulator, multiplier, backend)


def wgrad_step(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """Step one matrix from its gradient's factors."""
    # Low-rank factors are fp32, which the kernels of one GPU do not take.
    backend = "auto" if backend in WGRAD_ONLY else backend
    options: Projection = slot.rule.stages.projection
    gradient = Gradient.of(segments, accumulator, slot.weight.shape)
    right = options.is_right(gradient.shape)
    if slot.norm_sq is not None:
        fused.wgrad_norm_sq(gradient.segments, slot.norm_sq, gradient.accumulator, gradient.shape, backend)
    basis = slot.statistics[2]
    if int(slot.step) % options.gap == 0:
        basis.copy_(_basis(options.basis, gradient, basis, right, seed=f"{slot.name}:{int(slot.step)}"))
    low = gradient.right(basis.t()) if right else gradient.left(basis.t())
    if multiplier is not None:
        low = low * multiplier
    direction = adam(low, slot.statistics[:2], slot.scalars.unbind())
    if options.scaling is None:
        direction = direction * options.scale
        factors = (direction.t(), basis) if right else (basis.t(), direction)
        fused.wgrad_step(_applied(slot), [factors], None, None, backend)
    else:
        channels, multiplier = _scaled(slot, gradient, low, direction, multiplier, backend)
        fused.wgrad_step(_applied(slot), gradient.segments, gradient.accumulator, multiplier, backend, channels)


def _applied(slot: Slot) -> Slot:
    stage = slot.rule.stages.apply
    scalars = slot.scalars[slot.rule.n_scalars - stage.n_scalars :]
    return replace(slot, rule=stage, states=(), statistics=(), scalars=scalars, norm_sq=None, update_norm_sq=None)


def _scaled(slot: Slot, gradient: Gradient, low: Tensor, direction: Tensor, multiplier, backend: str):
    """What APOLLO's update is of G: factors of its channels, or None, and a multiplier; keeps its norm."""
    options: Projection = slot.rule.stages.projection
    before = slot.statistics[3]
    dim = (0, 1) if options.scaling == "tensor" else 1 if options.is_right(gradient.shape) else 0
    sizes = (torch.linalg.vector_norm(each, dim=dim, keepdim=True) for each in (direction, low))
    channels = next(sizes) / (next(sizes) + 1e-8)
    factor = torch.ones_like(before) if multiplier is None else multiplier
    if options.scaling == "tensor":
        channels, factor = None, factor * channels.squeeze()
    size = torch.empty_like(before)
    fused.wgrad_norm_sq(gradient.segments, size, gradient.accumulator, gradient.shape, backend, channels)
    size = size.sqrt_() * factor.abs()
    if int(slot.step) > 0:
        limiter = torch.clamp(size / (before + 1e-8), min=GROWTH) / GROWTH
        factor, size = factor / limiter, size / limiter
    before.copy_(torch.where(torch.isfinite(size), size, before))
    return channels, factor * options.scale


def _basis(kind: str, gradient: Gradient, template: Tensor, right: bool, seed: str) -> Tensor:
    """``V [r, I]`` if ``right``, otherwise ``U [O, r]``; as ``template``."""
    rank = template.shape[0] if right else template.shape[1]
    # Drawn on the CPU, so that replicas and devices draw alike.
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    if kind == "random":
        return torch.randn(template.shape, generator=generator).to(template.device) / rank**0.5
    if kind == "svd":
        vectors, _, covectors = torch.linalg.svd(_finite(gradient.dense(template)), full_matrices=False)
    else:
        width = min(rank + OVERSAMPLING, *gradient.shape)
        draw = torch.randn(gradient.shape[1], width, generator=generator).to(template.device)
        space = _orthonormal(gradient.right(draw))
        for _ in range(POWER_ITERATIONS):
            space = _orthonormal(gradient.right(_orthonormal(gradient.left(space.t()).t())))
        vectors, _, covectors = torch.linalg.svd(_finite(gradient.left(space.t())), full_matrices=False)
        vectors = space @ vectors
    return covectors[:rank] if right else vectors[:, :rank]


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.qr(_finite(x)).Q


def _finite(x: Tensor) -> Tensor:
    """A decomposition of what is not finite raises; the step leaves such a weight alone in any case."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
