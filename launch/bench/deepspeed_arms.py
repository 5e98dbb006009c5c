"""DeepSpeed's ZeRO-2 and ZeRO-3 with torch's fused AdamW as the client's optimizer, which needs no compiled operator.

Of bf16 weights both keep an fp32 master and fp32 moments, as ``fp32-master`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from launch.bench.arm import Arm, Settings


class Engine:
    """DeepSpeed's engine as the bench's loop asks an optimizer.

    Attributes:
        optim: torch's optimizer on this rank's part.
    """

    def __init__(self, engine):
        self._engine = engine
        self.optim = engine.optimizer.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        """DeepSpeed frees the gradients too."""
        self._engine.step()

    def zero_grad(self) -> None:
        pass

    @property
    def gradients(self) -> list:
        """This rank's part of them, between backward and step."""
        flat = getattr(self._engine.optimizer, "grad_partitions_flat_buffer", None)
        return [self._engine.optimizer.averaged_gradients, [] if flat is None else flat]

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, the parameters are whole on every rank."""
        import deepspeed

        sharded = any(hasattr(p, "ds_tensor") for p in parameters)
        with deepspeed.zero.GatheredParameters(parameters) if sharded else nullcontext():
            yield


def _zero(stage: int) -> Callable:
    def attach(model: nn.Module, settings: Settings):
        import deepspeed

        optimizer = torch.optim.AdamW(model.parameters(), **settings.adamw, fused=True)
        configuration = {
            # One forward a step: it only says what DeepSpeed prints.
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
            # It clips at 1 unless told.
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration, dist_init_required=None
        )
        return engine, Engine(engine)

    return attach


def _arm(stage: int) -> Arm:
    name = f"deepspeed-zero{stage}"
    return Arm(_zero(stage), against=name, over_ranks=True, package="deepspeed")


ARMS: dict[str, Arm] = {"deepspeed-zero2": _arm(2), "deepspeed-zero3": _arm(3)}
