"""``nn.Linear`` whose weight may be owned."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from forge_megatron.linear.attached import Attached
from forge_megatron.linear.function import owned_linear
from forge_megatron.linear.untraced import untraced


class ForgeLinear(Attached, nn.Linear):
    """``nn.Linear`` that hands its weight gradient to the owner of its weight."""

    plain = nn.Linear

    # Here and not in what it calls: a compiler would make a graph, and look for it, for every layer of a model anew.
    @untraced
    def forward(self, input: Tensor) -> Tensor:
        owned = self.owner_in_forward()
        if owned is None:
            return F.linear(input, self.weight, self.bias)
        return owned_linear(input, owned, self.bias)
