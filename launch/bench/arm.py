"""What an arm is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: RMS of the distance from the judge's weights, by the RMS of what training changed, fp32, 20 steps. Adam turns
#: a last bit of a gradient near 0 into a whole step of its coordinate: with sums in another order one in a few
#: thousand coordinates does so, while a wrong hyperparameter, a missing decay or a lost token moves this above 1e-2.
PARITY_BOUND = 5e-3

BETAS, EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Settings:
    """What every arm of a cell is given.

    Attributes:
        bucket_bytes: of a gradient bucket over ranks; None: the arm's own default.
    """

    lr: float
    weight_decay: float
    bucket_bytes: int | None = None

    @property
    def adamw(self) -> dict:
        """AdamW's hyperparameters, by torch's names."""
        return {"lr": self.lr, "betas": BETAS, "eps": EPS, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        attach: ``(model, settings) -> optimizer`` with ``step`` and ``zero_grad``, or ``(model, optimizer)`` where the
            model is wrapped. An optimizer with a ``backward(loss)`` is asked for it. Through Megatron
            ``(recipe, models) -> (chunks, optimizer)``, as :func:`launch.optim.wrap_and_optimize`.
        judge: the arm whose update it must make; None: it is the judge of others.
        bound: of the distance from the judge; None: reported, not bounded.
        approximate: its projections of the gradient are others than the judge's; said wherever it is reported.
        stepwise: the parity check begins every step at the judge's weights, and only states run on. For rules whose
            step jumps where a gradient changes its sign: a last bit is a whole step there, and from that step on
            no gradient of the two is the same.
        against: the arm that its ratios are to; None: the bench's baseline.
        package: what must be installed, as pip names it; None: torch alone.
        captured: the whole step is one CUDA graph.
        fused_head: the loss is taken by blocks of the vocabulary, without logits.
        liger_loss: the loss is Liger's of head and labels together, which waits for the device.
        clip: the loop calls ``torch.nn.utils.clip_grad_norm_`` with this norm.
        micro_batches: backward passes a step, each of the cell's batch.
        over_ranks: needs a process group; ``attach`` makes what the ranks share.
        bucketed: has a bucket size to choose.
        dtype: of the weights; None: the shape's.
        megatron: keys of the trainer's recipe that are the arm's; None: it is not an arm through Megatron.
    """

    attach: Callable
    judge: str | None = "adamw-foreach"
    bound: float | None = PARITY_BOUND
    approximate: bool = False
    stepwise: bool = False
    against: str | None = None
    package: str | None = None
    captured: bool = False
    fused_head: bool = False
    liger_loss: bool = False
    clip: float | None = None
    micro_batches: int = 1
    over_ranks: bool = False
    bucketed: bool = False
    dtype: str | None = None
    megatron: dict | None = None


class Several:
    """Optimizers that are stepped one after the other."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class InBackward(Several):
    """Optimizers whose hooks have already stepped; nothing is left for the loop.

    Args:
        keep: what must live as long, such as handles of hooks.
    """

    def __init__(self, *optimizers, keep=()):
        super().__init__(*optimizers)
        self._keep = keep

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass
