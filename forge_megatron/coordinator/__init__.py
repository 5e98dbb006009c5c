"""Sinks for gradients that are not complete when a layer's backward ends, and the plan that chooses one."""

from forge_megatron.coordinator.decision import Decision, decide, global_norm
from forge_megatron.coordinator.loss_scale import LossScale, loss_scale
from forge_megatron.coordinator.ordinary import OrdinaryGradients
from forge_megatron.coordinator.pending import Pending
from forge_megatron.coordinator.plan import Plan, plan
from forge_megatron.coordinator.skips import Skip, Skips
from forge_megatron.coordinator.waiting import KeepFactors

__all__ = [
    "Decision",
    "KeepFactors",
    "LossScale",
    "OrdinaryGradients",
    "Pending",
    "Plan",
    "Skip",
    "Skips",
    "decide",
    "global_norm",
    "loss_scale",
    "plan",
]
