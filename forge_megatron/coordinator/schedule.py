"""The schedule for gradients that are partial over ranks, from a plan."""

from __future__ import annotations

from forge_megatron.coordinator.partial import PartialSums
from forge_megatron.coordinator.plan import Plan
from forge_megatron.coordinator.ranks import Ranks
from forge_megatron.coordinator.replicated import Replicated
from forge_megatron.coordinator.sharded import ShardedStates
from forge_megatron.coordinator.window import Client


def across_ranks(plan: Plan, backend: str, client: Client) -> PartialSums | None:
    """None where every gradient is complete on its rank. Every rank of the group calls it at the same point."""
    if plan.process_group is None:
        return None
    buckets = plan.buckets
    ranks = Ranks(plan.process_group, buckets.timeout, buckets.deterministic, plan.shard_group)
    return (ShardedStates if plan.sharding == "states" else Replicated)(
        ranks, buckets, backend, client, waits=plan.waits, scale=plan.gradient_scale
    )
