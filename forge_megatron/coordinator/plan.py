"""Which schedule a set of options asks for, or the reason why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch
import torch.distributed as dist

from forge_megatron.coordinator.bucket import Buckets


@dataclass(frozen=True)
class Plan:
    """What happens to a weight gradient between its backward and ``step()``.

    Attributes:
        waits: every owned weight's factors are kept to ``step()``.
        micro_batches: backward passes that ``step()`` may close; None: any number.
        clip_grad_norm: largest gradient norm; None: no clipping.
        clip_each: of every parameter by itself, not of all together.
        atomic: a gradient that is not finite skips the whole step.
        gradient_scale: of every gradient.
        process_group: the ranks that each hold a part of every gradient; None: each is complete here.
        sharding: "none", or "states": each rank holds a part of them.
        shard_group: the ranks of ``process_group`` that hold all parts once; None: all of them.
        buckets: in which gradients are summed over the group.
        accumulation_dtype: of the sum of micro-batches of a 16-bit parameter.
    """

    waits: bool
    micro_batches: int | None
    clip_grad_norm: float | None
    clip_each: bool
    atomic: bool
    gradient_scale: float = 1.0
    process_group: dist.ProcessGroup | None = None
    sharding: str = "none"
    buckets: Buckets = field(default_factory=Buckets)
    accumulation_dtype: torch.dtype = torch.float32
    shard_group: dist.ProcessGroup | None = None

    @property
    def keeps_sums(self) -> bool:
        """Sums over ranks are kept until the norm of all is known."""
        return self.atomic or self.clip_grad_norm is not None


def plan(
    *,
    accumulation_steps: int | None = 1,
    clip_grad_norm: float | None = None,
    clip: str = "global",
    waiting: bool | None = None,
    skip: str = "flag",
    gradient_scale: float = 1.0,
    process_group: dist.ProcessGroup | None = None,
    sharding: str = "none",
    buckets: Buckets | None = None,
    sharded: bool = False,
    accumulation_dtype: torch.dtype = torch.float32,
    shard_group: dist.ProcessGroup | None = None,
) -> Plan:
    """Checks the options of :func:`forge_megatron.attach` that decide when a weight is stepped.

    Args:
        accumulation_steps: micro-batches a step, at least 1; None: any number.
        clip_grad_norm: a norm above 0; None and infinity mean no clipping.
        clip: ``"global"``: the norm of all gradients; ``"weight"``: of each parameter's.
        waiting: True: keep every weight's factors although nothing else asks for it (a late scale). False: the last of
            ``accumulation_steps`` micro-batches is added to the sum in registers and stepped in its backward. None: it
            waits too.
        skip: ``"flag"``: a coordinate whose gradient is not finite keeps its weight and state; ``"atomic"``: every
            coordinate does then.
        gradient_scale: what every gradient is multiplied by, above 0.
        process_group: ranks that each hold a part of the tokens.
        sharding: ``"none"``: weights and states on every rank of the group; ``"states"``: each holds its rows of the
            states; ``"full"``: as ``fully_shard`` has sharded them.
        buckets: how gradients are summed over the group.
        sharded: the weights are already sharded by ``fully_shard``.
        accumulation_dtype: ``torch.float32``, or ``torch.bfloat16``: half of the memory of a sum, rounded with every
            micro-batch, as the ``.grad`` of a bf16 parameter is.
        shard_group: of ``process_group``, the ranks that share one copy of the states with this one; each such group
            has a copy. None: there is one copy.

    Raises:
        ValueError: a value that has no meaning.
        NotImplementedError: an option that is not built yet.
    """
    if sharded and (process_group is not None or sharding not in ("none", "full")):
        option = f"sharding={sharding!r}" if process_group is None else "process_group="
        raise ValueError(f"{option} with weights that fully_shard has sharded, which reduces their gradients; omit it")
    if sharding == "full" and not sharded:
        raise ValueError("sharding='full' with weights that are not sharded; call fully_shard, then attach")
    _check_ranks(process_group, sharding, buckets)
    _check_instances(process_group, sharding, shard_group)
    if not isinstance(waiting, bool | None):
        raise ValueError(f"waiting={waiting!r}; give True or False")
    if skip not in ("flag", "atomic"):
        raise ValueError(f"skip={skip!r} is unknown; use 'flag' or 'atomic'")
    if isinstance(gradient_scale, bool) or not isinstance(gradient_scale, Real) or not 0 < gradient_scale < math.inf:
        raise ValueError(f"gradient_scale={gradient_scale!r}; give a number above 0")
    if gradient_scale != 1.0 and sharded:
        raise NotImplementedError("gradient_scale= with weights that fully_shard has sharded; scale the loss")
    if accumulation_steps is not None and (
        isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, Integral) or accumulation_steps < 1
    ):
        raise ValueError(f"accumulation_steps={accumulation_steps!r}; give a whole number of at least 1")
    _check_sums(accumulation_dtype, sharded)
    limit = _limit(clip_grad_norm)
    if clip not in ("global", "weight"):
        raise ValueError(f"clip={clip!r} is unknown; use 'global' or 'weight'")
    if clip == "weight" and limit is None:
        raise ValueError("clip='weight' without a norm; give clip_grad_norm=")
    atomic = skip == "atomic"
    in_backward = waiting is False and accumulation_steps is not None
    if in_backward and accumulation_steps != 1 and (sharded or process_group is not None):
        raise NotImplementedError(
            f"waiting=False with accumulation_steps={accumulation_steps} over ranks, whose sums are made in step(); "
            "leave waiting out"
        )
    waits = bool(waiting) or atomic or limit is not None or (accumulation_steps != 1 and not in_backward)
    ranks = process_group, sharding, buckets or Buckets()
    how = waits, accumulation_steps, limit, clip == "weight", atomic, gradient_scale
    return Plan(*how, *ranks, accumulation_dtype, shard_group)


def _check_ranks(process_group, sharding: str, buckets: Buckets | None) -> None:
    if sharding not in ("none", "states", "full"):
        raise ValueError(f"sharding={sharding!r} is unknown; use 'none', 'states' or 'full'")
    if process_group is None:
        if sharding == "states" or buckets is not None:
            given = f"sharding={sharding!r}" if sharding == "states" else "buckets="
            raise ValueError(f"{given} without process_group=; give the data-parallel group")
        return
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group={process_group!r}; give a torch.distributed.ProcessGroup that this rank is a member of, "
            "for example torch.distributed.group.WORLD"
        )
    if buckets is not None and not isinstance(buckets, Buckets):
        raise TypeError(f"buckets={buckets!r}; give a forge_megatron.Buckets")


def _check_instances(process_group, sharding: str, shard_group) -> None:
    if shard_group is None:
        return
    if sharding != "states":
        raise ValueError(f"shard_group= with sharding={sharding!r}; give sharding='states', or leave it out")
    if not isinstance(shard_group, dist.ProcessGroup):
        raise TypeError(
            f"shard_group={shard_group!r}; give a torch.distributed.ProcessGroup that this rank is a member of, for "
            "example mesh.get_group('shard')"
        )
    others = set(dist.get_process_group_ranks(shard_group)) - set(dist.get_process_group_ranks(process_group))
    if others:
        raise ValueError(f"shard_group= has the ranks {sorted(others)}, which are not in process_group=")


def _check_sums(dtype, sharded: bool) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"accumulation_dtype={dtype!r}; give torch.float32 or torch.bfloat16")
    if dtype is torch.bfloat16 and sharded:
        raise ValueError(
            "accumulation_dtype=torch.bfloat16 with weights that fully_shard has sharded, whose sums are in the "
            "dtype of its MixedPrecisionPolicy(reduce_dtype=...); set it there"
        )


def _limit(value) -> float | None:
    if value is None:
        return None
    try:
        limit = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        limit = math.nan
    if not limit > 0:
        raise ValueError(f"clip_grad_norm={value!r}; give a number above 0, or None for no clipping")
    return None if math.isinf(limit) else limit
