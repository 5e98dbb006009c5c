"""Steps of low-rank rules from a gradient's factors: the gradient itself is never formed.

``R = G V^T`` is ``dY^T (X V^T)``. Adam's direction N of R, projected back, is ``(N^T)^T V``: the product that the
fused kernel forms tile by tile, with r in the place of the tokens, and steps the weight with.

Of a shard every product with G is made whole, a sum of the ranks' parts or their parts side by side, and so are the
projection and N: each rank projects back what its shard needs of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rules.projection import ADAM, Projection
from ..rules.whole import Whole
from . import fused
from .backend import WGRAD_ONLY
from .bf16_parts import in_bf16
from .lookups import Lookups, is_lookup
from .measured import applied
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
        product = None if self.accumulator is None else self.accumulator.float() @ basis
        for dy, x in self.segments:
            product = _added(product, dy, x.float() @ basis, self.part[0])
        product = basis.new_zeros(self.part[0], basis.shape[1]) if product is None else product
        return self.whole.sums((product, (1,)))[0]

    def left(self, basis: Tensor) -> Tensor:
        """``basis @ G``, fp32, for ``[k, O]``."""
        basis = self.whole.cut(basis, 1, of=0)
        product = None if self.accumulator is None else basis @ self.accumulator.float()
        for dy, x in self.segments:
            of_tokens = basis[:, dy] if is_lookup((dy, x)) else basis @ dy.float().t()
            product = of_tokens @ x.float() if product is None else product.addmm_(of_tokens, x.float())
        product = basis.new_zeros(basis.shape[0], self.part[1]) if product is None else product
        return self.whole.sums((product, (0,)))[0]

    def dense(self, like: Tensor) -> Tensor:
        """G itself, fp32, on the device of ``like``."""
        total = None if self.accumulator is None else self.accumulator.to(torch.float32, copy=True)
        for dy, x in self.segments:
            total = _added(total, dy, x.float(), self.part[0])
        return self.whole.gathered(like.new_zeros(self.part) if total is None else total)


def _added(product: Tensor | None, dy: Tensor, x: Tensor, rows: int) -> Tensor:
    """``dY^T X`` of one segment, ``[rows, columns of x]``, added to ``product``, without atomics."""
    if is_lookup((dy, x)):
        product = x.new_zeros(rows, x.shape[1]) if product is None else product
        Lookups.of([(dy, x)]).add_all_to(product)
        return product
    dy = dy.float().t()
    return dy @ x if product is None else product.addmm_(dy, x)


def step(slot: Slot, grad: Tensor, multiplier: Tensor | None, backend: str) -> None:
    """Step one matrix from a gradient that is in memory."""
    accumulator = grad.float() if grad.dtype is torch.float16 else grad
    wgrad_step(slot, (), accumulator, multiplier, backend)


def wgrad_step(
    slot: Slot, segments: Sequence[Segment], accumulator: Tensor | None, multiplier: Tensor | None, backend: str
) -> None:
    """Step one matrix from its gradient's factors.

    But for a refresh of the projection it launches the same kernels each time and reads nothing on the host.
    """
    # Low-rank factors and channels are taken by the portable kernels alone.
    backend = "auto" if backend in WGRAD_ONLY else backend
    options: Projection = slot.rule.stages.projection
    gradient = Gradient.of(slot, segments, accumulator)
    low = _projected(slot, gradient, multiplier)
    along = 0 if options.is_right(gradient.shape) else 1
    dim = 1 - along if options.scaling == "channel" else (0, 1)
    lengths = torch.linalg.vector_norm(low, dim=dim, keepdim=True)
    # 1, or NaN where a square of anything is not finite: then nothing of the weight and its states is stepped.
    factor = lengths.square().sum() * 0.0 + 1.0
    direction = torch.empty_like(low)
    moments = Slot(ADAM, direction, slot.statistics[:2], slot.scalars[: ADAM.n_scalars], name=slot.name)
    fused.step([moments], [low], factor, backend)
    if options.scaling is None:
        if slot.norm_sq is not None:
            fused.wgrad_norm_sq(gradient.segments, slot.norm_sq, gradient.accumulator, gradient.part, backend)
        back = _back(slot, direction, along)
        fused.wgrad_step(_applied(slot, measures=False), [back], None, factor * options.scale, backend)
        return
    channels = torch.linalg.vector_norm(direction, dim=dim, keepdim=True) / (lengths + 1e-8)
    factor = factor if multiplier is None else factor * multiplier
    if options.scaling == "tensor":
        channels, factor = None, factor * channels.squeeze()
    else:
        channels = slot.whole.cut(channels, along, of=along)
    factor = _limited(slot, gradient, channels, factor, backend) * options.scale
    applied = _applied(slot, measures=channels is not None)
    fused.wgrad_step(applied, gradient.segments, gradient.accumulator, factor, backend, channels)


def _projected(slot: Slot, gradient: Gradient, multiplier: Tensor | None) -> Tensor:
    """``R``, fp32, and the projection refreshed first where that is due."""
    options: Projection = slot.rule.stages.projection
    right = options.is_right(gradient.shape)
    basis, taken = slot.statistics[2], int(slot.step)
    due = options.is_due(taken)
    chosen = _basis(options.basis, gradient, basis, right, seed=f"{slot.name}:{taken}") if due else basis
    low = gradient.right(chosen.t()) if right else gradient.left(chosen.t())
    if multiplier is not None:
        low = low * multiplier
    if due:
        # Without a finite gradient the old projection stays. At first there is none, and any is better, unless the step
        # is not to be taken.
        witness = low if taken else chosen if multiplier is None else multiplier
        basis.copy_(torch.where(torch.isfinite(witness).all(), chosen, basis))
    return low


def _back(slot: Slot, direction: Tensor, along: int) -> Segment:
    """The factors whose product is N projected back, of this rank's part."""
    basis = slot.statistics[2]
    rows, columns = (basis, direction) if along else (direction, basis)
    rows, columns = slot.whole.cut(rows, 0, of=0).t(), slot.whole.cut(columns, 1, of=1)
    return in_bf16(rows, columns) if multiplies_in_bf16(rows.device) else (rows, columns)


def multiplies_in_bf16(device: torch.device) -> bool:
    """Whether six products of bf16 are faster than one of fp32."""
    return device.type == "cuda"


def _applied(slot: Slot, *, measures: bool) -> Slot:
    """What takes the direction in the gradient's place.

    Args:
        measures: the launch forms G itself, and its norm with it.
    """
    known = applied(slot)
    known.norm_sq = slot.norm_sq if measures else None
    return known


def _limited(slot: Slot, gradient: Gradient, channels: Tensor | None, factor: Tensor, backend: str) -> Tensor:
    """``factor``, or less: APOLLO's update is G times ``channels`` and it, and may grow so much. Keeps its norm."""
    before = slot.statistics[3]
    # Without channels it is the norm of G that everybody asks for.
    shared = channels is None and slot.norm_sq is not None
    norm_sq = slot.norm_sq if shared else torch.empty_like(before)
    fused.wgrad_norm_sq(gradient.segments, norm_sq, gradient.accumulator, gradient.part, backend, channels)
    (size,) = slot.whole.sums((norm_sq, (0, 1)))
    size = size.sqrt() * factor.abs()
    if int(slot.step) > 0:
        limiter = torch.clamp(size / (before + 1e-8), min=GROWTH) / GROWTH
        factor, size = factor / limiter, size / limiter
    before.copy_(torch.where(size < math.inf, size, before))
    return factor


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
        # The decomposition of a square matrix: its long side is left to a product.
        long, square = torch.linalg.qr(_finite(gradient.left(space.t())).t())
        vectors, _, covectors = torch.linalg.svd(square.t(), full_matrices=False)
        vectors, covectors = space @ vectors, covectors @ long.t()
    return covectors[:rank] if right else vectors[:, :rank]


def _orthonormal(x: Tensor) -> Tensor:
    return torch.linalg.qr(_finite(x)).Q


def _finite(x: Tensor) -> Tensor:
    """A decomposition of what is not finite raises; the step leaves such a weight alone in any case."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
