"""Experts in one tensor a linear as transformers has them: ``gate_up_proj`` or ``up_proj``, and ``down_proj``.

They are known by what transformers' ``use_experts_implementation`` puts on them; transformers is not imported.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_megatron.linear.attached import Attached
from forge_megatron.linear.grouped import grouped_mm, owned_grouped_linear
from forge_megatron.linear.untraced import untraced

#: Values of ``config._experts_implementation`` that multiply by torch, as :class:`ForgeRoutedExperts` does.
TORCH_IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm")

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "_apply_gate", "config")


def weights_of_routed(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights ``[experts, ...]`` of a module of experts; none for any other module."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    weights = [module._parameters.get(name) for name in names]
    return names if all(weight is not None and weight.dim() == 3 for weight in weights) else ()


class ForgeRoutedExperts(Attached):
    """Experts that hand their weight gradients to the owners of their weights; first base beside the module's class.

    The products are those of the module's own forward, of which transformers has several; sums may have another order.
    """

    plain = nn.Module

    @untraced
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Each token through the experts that were chosen for it.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: ``[T, k]``, numbers of experts.
            top_k_weights: ``[T, k]``, of their outputs.

        Returns:
            ``[T, H]``.
        """
        up, down = weights_of_routed(self)
        if self.owner_in_forward(up) is None and self.owner_in_forward(down) is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        x = self._multiply(up, hidden_states[order // top_k_index.shape[-1]], experts, ends)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        y = self._multiply(down, x, experts, ends)
        y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return y[back].view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _multiply(self, name: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        weight, device = getattr(self, name), x.device.type
        x = x.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype)
        if self.owner_in_forward(name) is not None:
            y = owned_grouped_linear(x, weight, ends, transposed=self.is_transposed)
        else:
            weight = weight.to(x.dtype)
            y = grouped_mm(x, weight if self.is_transposed else weight.transpose(1, 2), ends)
        return y + getattr(self, f"{name}_bias")[experts].to(y.dtype) if self.has_bias else y
