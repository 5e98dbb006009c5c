"""Rules that read more than their own coordinate, cut into stages that the fused kernels run.

A step has three. The **epilogue** is a fused rule on the tile of the gradient, with a scratch of the weight's
shape in the weight's place: regime 2 updates its states there and leaves the direction, regime 3 leaves the
gradient. What comes next reads more than a coordinate: **measures** are means or largest values over rows, columns
or the whole of that scratch, the first of them taken while a tile of the gradient is formed; a **matrix**
stage is torch on the scratch. **Apply** is a fused rule again, with the scratch in the gradient's place and what was
measured among its hyperparameters, so masters and weight stores are what they are for every rule.

A coordinate whose gradient is not finite is NaN in the scratch. What is mixed with it is then NaN everywhere, and apply
keeps the whole weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from .bind import torch_language as tl
from .whole import Whole

if TYPE_CHECKING:
    from .projection import Projection


@dataclass(frozen=True)
class Stage:
    """A fused rule within a rule: what the kernels read of one.

    Attributes:
        name: for errors.
        states: which of the rule's weight-shaped states it updates.
        n_scalars: how many of the rule's scalars it reads.
        update: ``(g, w, states, h) -> (w, states)``, as a rule's.
        nonnegative: which of the states are never below 0, as the rule says.
        on_scratch: its weight is a scratch, which lies elsewhere at each step and holds nothing yet: the update does
            not read ``w``, and a coordinate whose gradient is not finite becomes NaN.
    """

    name: str
    states: tuple[str, ...]
    n_scalars: int
    update: Callable
    nonnegative: tuple[str, ...] = ()
    on_scratch: bool = False
    stages: ClassVar[None] = None


def numbers_are_factors(numbers, statistics, h, layer):
    return (), numbers


def no_factors(statistics: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ()


class Layer(NamedTuple):
    """The whole weight, whatever part of it is here.

    Attributes:
        shape: its shape.
        dtype: of the numbers that are stepped: the master's, where there is one.
    """

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Measure:
    """Numbers of the rows, the columns or the whole of one layer, which a rule reads.

    A number is the mean over some dimensions, or with ``largest`` the largest, of what one coordinate gives.

    Attributes:
        values: ``(u, w, h) -> (value, ...)``, what each coordinate gives, on fp32 tiles of any shape and with ``tl``
            as a rule's ``update`` has it. ``u`` is what the epilogue left; ``h`` are the scalars after the epilogue's,
            then the factors so far, each of extent 1 in the dimensions along which it does not vary.
        over: ``number of the weight's dimensions -> ((index of a value, dimensions that it is reduced over), ...)``.
        settle: ``(numbers, statistics, h, layer) -> (new statistics, factors)``, in torch: the numbers keep their
            reduced dimensions, and are those of the whole weight, as the statistics are, and the factors that it
            gives to later measures and to apply. New statistics replace the old ones after the step.
        reads_weight: ``values`` reads ``w``, the weight or its master; otherwise ``w`` is ``u``.
        largest: the values are not negative, and the largest counts.
    """

    values: Callable
    over: Callable[[int], tuple[tuple[int, tuple[int, ...]], ...]]
    settle: Callable = numbers_are_factors
    reads_weight: bool = False
    largest: bool = False


@dataclass(frozen=True)
class Stages:
    """How a rule runs.

    The rule's scalars are those of the epilogue, then the matrix stage's own, then apply's. With measures, apply reads
    all that the epilogue does not, then the factors.

    Attributes:
        epilogue: on G, with the scratch as its weight.
        apply: on the direction, with the weight as its weight.
        measures: what is measured of the scratch, one after another, in the place of a matrix stage.
        given: ``statistics -> factors`` that the first measure reads already.
        transform: ``[..., O, I] -> [..., O, I]``, fp32, of the scratch alone: equal shapes are stacked.
        reads: what ``transform`` rounds the scratch to before anything else.
        direct: ``(u, statistics, h, whole) -> direction``, fp32, where the matrix stage reads more than the scratch:
            the scratch, to which it may write, the statistics, which it updates in place, all scalars as 0-dim
            tensors, and the weight of which ``u`` may be a part.
        projection: how matrices are stepped instead, from a projection of the gradient.
    """

    epilogue: Stage
    apply: Stage
    measures: tuple[Measure, ...] = ()
    given: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = no_factors
    transform: Callable[[Tensor], Tensor] | None = None
    reads: torch.dtype = torch.float32
    direct: Callable | None = None
    projection: Projection | None = None


def over_all(count: int) -> Callable:
    """``over`` of a measure each of whose ``count`` values has one number of the whole weight."""
    return lambda dims: tuple((index, tuple(range(dims))) for index in range(count))


def over_rows_and_columns(dims: int) -> tuple:
    """``over`` of a measure that has a number of each row and each column, and of a vector of each coordinate."""
    return ((0, (-1,)), (0, (-2,))) if dims > 1 else ((0, ()),)


def store_gradient(g, w, states, h):
    return g, states


def step_decayed(u, w, states, h):
    decay, step_size = h
    return tl.fma(u, -step_size, w * decay), states


#: Regime 3's epilogue: the gradient of one layer, for as long as that layer's backward lasts.
STORE_GRADIENT = Stage("gradient", (), 0, store_gradient, on_scratch=True)

#: ``w <- w * decay - step_size * u``; scalars ``(decay, step_size)``.
STEP_DECAYED = Stage("step", (), 2, step_decayed)


def sign_of(group: Mapping) -> float:
    return -1.0 if group["maximize"] else 1.0


def root_numel(x: Tensor, whole: Whole) -> float:
    """What a whole tensor's norm is divided by to be the root mean square of its entries."""
    return math.sqrt(whole.shape(x).numel())


def settle(statistics: tuple[Tensor, ...], new: tuple[Tensor, ...], witness: Tensor) -> Tensor:
    """Replaces ``statistics`` by ``new`` unless ``witness``, a number that read every entry, is not finite.

    Returns:
        1 or NaN, 0-dim: what to multiply a direction with so that it shares the statistics' fate.
    """
    finite = torch.isfinite(witness)
    for old, value in zip(statistics, new, strict=True):
        old.copy_(torch.where(finite, value, old))
    return torch.where(finite, 1.0, math.nan)
