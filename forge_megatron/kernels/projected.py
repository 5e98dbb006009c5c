"""Steps of low-rank rules from a gradient's factors: the gradient itself is never formed.

``R = G V^T`` is ``dY^T (X V^T)``. Adam's direction N of R, projected back, is ``(N^T)^T V``: the product that the
fused kernel forms tile by tile, with r in the place of the tokens, and steps the weight with.

Of a shard every product with G is made whole, a sum of the ranks' parts or their parts side by side, and so are the
projection and N: each rank projects back what its shard needs of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..rules.projection import Projection, adam
from ..rules.whole import Whole
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

    Every method is a collective of the ranks that have shards of the weight.

    Attributes:
        segments: factors of its parts; where ids stand for dY, each names a row.
        accumulator: fp32 or bf16 ``[O, I]``, or None.
        part: ``[O, I]`` of what this rank has.
        shape: of the whole.
        whole: the weight.
    """

    segments: Sequence[Segment]
    accumulator: Tensor | None
    part: torch.Size
    shape: torch.Size
    whole: Whole

    @classmethod
    def of(cls, slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None) -> Gradient:
        """Without segments of no tokens, and with every id in range."""
        part = slot.weight.shape
        kept = []
        for dy, x in segments:
            if is_lookup((dy, x)):
                # Ids outside are no row (padding_idx): any row, to which nothing is added.
                inside = (dy >= 0) & (dy < part[0])
                dy, x = dy.clamp(0, part[0] - 1), x.masked_fill(~inside.unsqueeze(1), 0.0)
            if dy.shape[0]:
                kept.append((dy, x))
        return cls(kept, accumulator, part, slot.whole.shape(slot.weight), slot.whole)

    def right(self, basis: Tensor) -> Tensor:
        """``G @ basis``, fp32, for ``[I, k]``."""
        basis = self.whole.cut(basis, 0, of=1)
        product = basis.new_zeros(self.part[0], basis.shape[1])
        if self.accumulator is not None:
            product.addmm_(self.accumulator.float(), basis)
        for dy, x in self.segments:
            _add(product, dy, x.float() @ basis)
        return self.whole.sums((product, (1,)))[0]

    def left(self, basis: Tensor) -> Tensor:
        """``basis @ G``, fp32, for ``[k, O]``."""
        basis = self.whole.cut(basis, 1, of=0)
        product = basis.new_zeros(basis.shape[0], self.part[1])
        if self.accumulator is not None:
            product.addmm_(basis, self.accumulator.float())
        for dy, x in self.segments:
            product.addmm_(basis[:, dy] if is_lookup((dy, x)) else basis @ dy.float().t(), x.float())
        return self.whole.sums((product, (0,)))[0]

    def dense(self, like: Tensor) -> Tensor:
        """G itself, fp32, on the device of ``like``."""
        total = like.new_zeros(self.part)
        if self.accumulator is not None:
            total += self.accumulator
        for dy, x in self.segments:
            _add(total, dy, x.float())
        return self.whole.gathered(total)


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
    gradient = Gradient.of(slot, segments, accumulator)
    right = options.is_right(gradient.shape)
    if slot.norm_sq is not None:
        fused.wgrad_norm_sq(gradient.segments, slot.norm_sq, gradient.accumulator, gradient.part, backend)
    basis, taken = slot.statistics[2], int(slot.step)
    is_refresh = taken % options.gap == 0
    chosen = _basis(options.basis, gradient, basis, right, seed=f"{slot.name}:{taken}") if is_refresh else basis
    low = gradient.right(chosen.t()) if right else gradient.left(chosen.t())
    if is_refresh:
        # Without a gradient that is finite the old projection stays; at first there is none, and any is better.
        basis.copy_(torch.where(torch.isfinite(low).all(), chosen, basis) if taken else chosen)
    if multiplier is not None:
        low = low * multiplier
    direction = adam(low, slot.statistics[:2], slot.scalars.unbind())
    if options.scaling is None:
        direction = direction * options.scale
        rows, columns = (direction, basis) if right else (basis, direction)
        factors = slot.whole.cut(rows, 0, of=0).t(), slot.whole.cut(columns, 1, of=1)
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
    before, along = slot.statistics[3], 0 if options.is_right(gradient.shape) else 1
    dim = (0, 1) if options.scaling == "tensor" else 1 - along
    sizes = (torch.linalg.vector_norm(each, dim=dim, keepdim=True) for each in (direction, low))
    channels = next(sizes) / (next(sizes) + 1e-8)
    factor = torch.ones_like(before) if multiplier is None else multiplier
    if options.scaling == "tensor":
        channels, factor = None, factor * channels.squeeze()
    else:
        channels = slot.whole.cut(channels, along, of=along)
    size = torch.empty_like(before)
    fused.wgrad_norm_sq(gradient.segments, size, gradient.accumulator, gradient.part, backend, channels)
    (size,) = slot.whole.sums((size, (0, 1)))
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
