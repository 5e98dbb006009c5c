"""The autograd function of an owned linear layer, ``Y = X Wᵀ + b``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_megatron.linear.owned import Use, open_use


class OwnedLinearFunction(torch.autograd.Function):
    """``dX = dY W`` from the weight before its update, then the factors of ``dYᵀ X`` to the weight's sink."""

    @staticmethod
    def forward(ctx, x: Tensor, ticket: Tensor | None, bias: Tensor | None, use: Use) -> Tensor:
        ctx.use = use
        ctx.has_bias = bias is not None
        if use.ticket is not None:
            ctx.save_for_backward(x)
        return F.linear(x, use.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        use: Use = ctx.use
        wanted = use.begin()
        x_wanted, _, bias_wanted, _ = ctx.needs_input_grad
        dx = None
        # An enclosing autocast region must not cast what the forward computed in.
        with torch.autocast(dy.device.type, enabled=False):
            if x_wanted:
                dx = dy @ use.weight.to(dy.dtype)
            rows = dy.reshape(-1, dy.shape[-1])
            dbias = rows.sum(0) if ctx.has_bias and bias_wanted else None
            if wanted:
                (x,) = ctx.saved_tensors
                # An input that autograd did not make is the user's, who may write the next batch into it.
                use.deliver(rows, x.reshape(-1, x.shape[-1]), borrowed=not x_wanted)
        return dx, None, dbias, None


# As torch.optim marks its own: torch.compiler.disable would import the compiler, which takes a second.
@torch._disable_dynamo
def owned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(x, weight, bias)`` for an owned weight.

    Under autocast the operands are cast as ``F.linear``'s are, and the gradient stays in fp32 from the
    accumulator to the update. ``torch.compile`` breaks the graph here: the update is a side effect of
    backward that a traced graph would drop.

    Args:
        x: ``[..., I]``, any strides.
        weight: ``[O, I]``, owned.
        bias: ``[O]`` or None.

    Returns:
        ``[..., O]``.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    elif x.dtype != weight.dtype:
        raise RuntimeError(
            f"expected the input and the weight to have the same dtype, got {x.dtype} and {weight.dtype}"
        )
    use = open_use(weight)
    y = OwnedLinearFunction.apply(x, use.ticket, bias, use)
    use.bind(y.grad_fn)
    return y
