"""What low-rank rules share: Adam on the projected gradient, and the options that say how it is projected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .bind import bind, torch_language
from .bind import torch_language as tl
from .rule import Rule
from .stages import STORE_GRADIENT, Stage, Stages, settle, sign_of

#: Two moments and the projection.
STATISTICS = ("exp_avg", "exp_avg_sq", "projection")


@dataclass(frozen=True)
class Projection:
    """How a matrix ``[O, I]`` is stepped from ``R = G V^T`` (``V [r, I]``, ``O >= I``) or ``R = U^T G`` (``U [O, r]``).

    Attributes:
        rank: ``r``, at most the smaller extent.
        gap: updates from one refresh of the projection to the next.
        basis: ``"range_finder"``: the leading singular vectors of G, found from its factors by a randomised range
            finder, which is an approximation; ``"svd"``: exact, for which one layer's G is formed at a refresh;
            ``"random"``: Gaussian, of variance ``1 / r``.
        scale: of the update.
        scaling: None: the update is Adam's direction, projected back. ``"channel"``: it is G, with each row
            (``O >= I``) or column scaled by ``|N| / |R|`` of that row or column, ``N`` Adam's direction;
            ``"tensor"``: with one such factor. Its norm may grow by at most 1.01 a step.
    """

    rank: int
    gap: int
    basis: str
    scale: float
    scaling: str | None = None

    def is_due(self, taken: int) -> bool:
        """Whether the update after ``taken`` others refreshes the projection."""
        return taken % self.gap == 0

    def is_right(self, shape: torch.Size) -> bool:
        return shape[0] >= shape[1]

    def shapes(self, shape: torch.Size) -> dict[str, tuple[int, ...]]:
        rows, columns = shape
        rank = min(self.rank, rows, columns)
        low = (rows, rank) if self.is_right(shape) else (rank, columns)
        basis = (rank, columns) if self.is_right(shape) else (rows, rank)
        shapes = dict(zip(STATISTICS, (low, low, basis), strict=True))
        return shapes if self.scaling is None else {**shapes, "scaled_grad": ()}


def scalars(group: Mapping, step: int) -> tuple[float, ...]:
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    step_size = lr * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step) if group["correct_bias"] else lr
    own = (1.0 - beta1, beta2, 1.0 - beta2, float(group["eps"]), sign_of(group))
    return (*own, step_size, 1.0 - lr * float(group["weight_decay"]))


def direction(r, n, states, h):
    """Adam's direction ``m / (sqrt(v) + eps)``, whatever ``n`` was."""
    weight1, beta2, weight2, eps, sign = h
    r = r * sign
    exp_avg = tl.fma(r - states[0], weight1, states[0])
    exp_avg_sq = tl.fma(r * weight2, r, states[1] * beta2)
    return exp_avg / (tl.sqrt(exp_avg_sq) + eps), (exp_avg, exp_avg_sq)


#: Adam on the projected gradient, with the direction in the weight's place.
ADAM = Stage("low-rank adam", STATISTICS[:2], 5, direction, STATISTICS[1:2])


def step_then_decay(u, w, states, h):
    step_size, decay = h
    return (w - step_size * u) * decay, states


def direct(u, statistics, h, whole):
    (r,) = whole.sums((u, ()))
    n, moments = bind(direction, torch_language)(r, None, statistics, h[: ADAM.n_scalars])
    return whole.part(n.mul_(settle(statistics, moments, moments[1].sum())))


def stages(projection: Projection) -> Stages:
    """Of a rule that projects matrices; vectors are not projected."""
    return Stages(STORE_GRADIENT, Stage("adam", (), 2, step_then_decay), direct=direct, projection=projection)


def statistics_for(projection: Projection, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    return projection.shapes(shape) if len(shape) == 2 else dict.fromkeys(STATISTICS[:2], tuple(shape))


def check(rule: Rule, group: Mapping, bases: tuple[str, ...]) -> None:
    for key in ("rank", "update_proj_gap"):
        rule.require_whole(group, key, 1)
    rule.require(group, "scale", 0.0)
    if group["proj"] not in bases:
        raise ValueError(f"{rule.name}: proj={group['proj']!r} is refused: use one of {', '.join(bases)}")


def fits(name: str, shape: torch.Size) -> None:
    if len(shape) > 2:
        raise ValueError(
            f'{name} projects matrices, and this is {list(shape)}; give it a group with rule="adamw" and its own lr'
        )


def low_rank(name: str, projection_for: Callable[[Mapping], Projection], check: Callable, **defaults) -> Rule:
    """A rule that steps by Adam on a projection of the gradient.

    Args:
        projection_for: of a group.
        check: as :class:`Rule`'s.
        defaults: the rule's own, beside those that all of them have.
    """
    return Rule(
        name=name,
        regime="projected",
        states=(),
        statistics_for=lambda group, shape: statistics_for(projection_for(group), shape),
        defaults={
            "update_proj_gap": 200,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0.0,
            "correct_bias": True,
            "maximize": False,
            **defaults,
        },
        scalars=scalars,
        check=check,
        fits=lambda group, shape: fits(name, shape),
        stages_for=lambda group: stages(projection_for(group)),
    )
