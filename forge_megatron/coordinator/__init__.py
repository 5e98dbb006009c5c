"""Sinks for gradients that are not complete when a layer's backward ends, and the plan that chooses one."""

from forge_megatron.coordinator.bucket import Buckets, extent
from forge_megatron.coordinator.decision import Decision, decide, global_norm
from forge_megatron.coordinator.fully_sharded import FullySharded
from forge_megatron.coordinator.loss_scale import LossScale, loss_scale
from forge_megatron.coordinator.ordinary import OrdinaryGradients
from forge_megatron.coordinator.partial import PartialSums
from forge_megatron.coordinator.parts import Part
from forge_megatron.coordinator.pending import Pending
from forge_megatron.coordinator.pending_sums import PendingSums
from forge_megatron.coordinator.plan import Plan, plan
from forge_megatron.coordinator.schedule import across_ranks
from forge_megatron.coordinator.shards import NormsOverRanks, ShardGroup, find_shards, wholes_of
from forge_megatron.coordinator.skips import Skip, Skips
from forge_megatron.coordinator.together import Stage, Together
from forge_megatron.coordinator.waiting import SumFactors

__all__ = [
    "Buckets",
    "Decision",
    "FullySharded",
    "LossScale",
    "NormsOverRanks",
    "OrdinaryGradients",
    "Part",
    "PartialSums",
    "Pending",
    "PendingSums",
    "Plan",
    "ShardGroup",
    "Skip",
    "Skips",
    "Stage",
    "SumFactors",
    "Together",
    "across_ranks",
    "decide",
    "extent",
    "find_shards",
    "global_norm",
    "loss_scale",
    "plan",
    "wholes_of",
]
