"""Sinks for gradients that are not complete when a layer's backward ends, and the plan that chooses one."""

from forge_megatron.coordinator.ordinary import OrdinaryGradients
from forge_megatron.coordinator.pending import Pending
from forge_megatron.coordinator.plan import Plan, plan
from forge_megatron.coordinator.waiting import KeepFactors

__all__ = ["KeepFactors", "OrdinaryGradients", "Pending", "Plan", "plan"]
