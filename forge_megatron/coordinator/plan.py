"""Which schedule a set of options asks for, or the reason why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Plan:
    """What happens to a weight gradient between its backward and ``step()``.

    Attributes:
        waits: every owned weight's factors are kept to ``step()``.
        micro_batches: backward passes that ``step()`` may close; None: any number.
        clip_grad_norm: largest gradient norm; None: no clipping.
        clip_each: of every parameter by itself, not of all together.
        atomic: a gradient that is not finite skips the whole step.
    """

    waits: bool
    micro_batches: int | None
    clip_grad_norm: float | None
    clip_each: bool
    atomic: bool


def plan(
    *,
    accumulation_steps: int | None = 1,
    clip_grad_norm: float | None = None,
    clip: str = "global",
    waiting: bool = False,
    skip: str = "flag",
    process_group=None,
    sharding: str = "none",
    sharded: bool = False,
) -> Plan:
    """Checks the options of :func:`forge_megatron.attach` that decide when a weight is stepped.

    Args:
        accumulation_steps: micro-batches a step, at least 1; None: any number.
        clip_grad_norm: a norm above 0; None and infinity mean no clipping.
        clip: ``"global"``: the norm of all gradients; ``"weight"``: of each parameter's.
        waiting: keep every weight's factors although nothing else asks for it (a late scale).
        skip: ``"flag"``: a coordinate whose gradient is not finite keeps its weight and state; ``"atomic"``: every
            coordinate does then.
        process_group: ranks that each hold a part of the tokens.
        sharding: where weights and states live.
        sharded: the weights are already sharded by ``fully_shard``.

    Raises:
        ValueError: a value that has no meaning.
        NotImplementedError: an option that is not built yet.
    """
    if sharded and (process_group is not None or sharding not in ("none", "full")):
        option = f"sharding={sharding!r}" if process_group is None else "process_group="
        raise ValueError(f"{option} with weights that fully_shard has sharded, which reduces their gradients; omit it")
    if sharding == "full" and not sharded:
        raise ValueError("sharding='full' with weights that are not sharded; call fully_shard, then attach")
    if process_group is not None:
        raise NotImplementedError(
            "process_group=: gradients that are partial over data-parallel ranks are not built yet; "
            "train in one process, or tensor parallel with --use-forge"
        )
    if sharding not in ("none", "full"):
        if sharding != "states":
            raise ValueError(f"sharding={sharding!r} is unknown; use 'none', 'states' or 'full'")
        raise NotImplementedError(f"sharding={sharding!r} is not built yet; use sharding='none'")
    if not isinstance(waiting, bool):
        raise ValueError(f"waiting={waiting!r}; give True or False")
    if skip not in ("flag", "atomic"):
        raise ValueError(f"skip={skip!r} is unknown; use 'flag' or 'atomic'")
    if accumulation_steps is not None and (
        isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1
    ):
        raise ValueError(f"accumulation_steps={accumulation_steps!r}; give a whole number of at least 1")
    limit = _limit(clip_grad_norm)
    if clip not in ("global", "weight"):
        raise ValueError(f"clip={clip!r} is unknown; use 'global' or 'weight'")
    if clip == "weight" and process_group is not None:
        raise NotImplementedError("clip='weight' over several ranks is not built yet; use clip='global'")
    if clip == "weight" and limit is None:
        raise ValueError("clip='weight' without a norm; give clip_grad_norm=")
    atomic = skip == "atomic"
    waits = waiting or atomic or limit is not None or accumulation_steps != 1
    return Plan(waits, accumulation_steps, limit, clip == "weight", atomic)


def _limit(value) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value <= 0:
        raise ValueError(f"clip_grad_norm={value!r}; give a number above 0, or None for no clipping")
    return None if math.isinf(value) else float(value)
