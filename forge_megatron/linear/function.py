"""The autograd function of an owned linear layer, ``Y = X Wᵀ + b``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_megatron.kernels import without_autocast
from forge_megatron.linear.owned import OwnedWeight, Use


class OwnedLinearFunction(torch.autograd.Function):
    """``dX = dY W`` from the weight before its update, then the factors of ``dYᵀ X`` to the weight's sink."""

    @staticmethod
    def forward(ctx, x: Tensor, ticket: Tensor | None, bias: Tensor | None, use: Use) -> Tensor:
        ctx.use = use
        ctx.has_bias = bias is not None
        if use.ticket is not None:
            ctx.save_for_backward(x)
        return F.linear(x, use.weight_as(x.dtype), bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        if torch.is_autocast_enabled(dy.device.type):
            with without_autocast(dy.device.type):
                return _backward(ctx, dy)
        return _backward(ctx, dy)


def _backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    use: Use = ctx.use
    wanted = use.begin()
    x_wanted, _, bias_wanted, _ = ctx.needs_input_grad
    dx = dy @ use.weight_as(dy.dtype) if x_wanted else None
    rows = _rows(dy)
    dbias = rows.sum(0) if ctx.has_bias and bias_wanted else None
    if wanted:
        (x,) = ctx.saved_tensors
        use.deliver(rows, _rows(x), borrowed=is_callers(x))
    return dx, None, dbias, None


# What Function.apply ends in outside torch.func, whose wrappers it looks for among all arguments first.
_apply = super(torch.autograd.Function, OwnedLinearFunction).apply


def is_callers(x: Tensor) -> bool:
    """Autograd did not make it: an input, into which the next batch may be written, or another weight."""
    return (x._base if x._is_view() else x).is_leaf


def _rows(tensor: Tensor) -> Tensor:
    """``[tokens, features]``; either may be 0."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def owned_linear(x: Tensor, owned: OwnedWeight, bias: Tensor | None) -> Tensor:
    """``F.linear(x, owned.weight, bias)``.

    Under autocast the operands are cast as ``F.linear``'s are, and the gradient stays in fp32 from the
    accumulator to the update. Call it where ``torch.compile`` does not trace: the update is a side effect of backward
    that a traced graph would drop.

    Args:
        x: ``[..., I]``, any strides.
        owned: of ``[O, I]``.
        bias: ``[O]`` or None.

    Returns:
        ``[..., O]``.
    """
    device, dtype = x.device.type, owned.weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # Autocast leaves float64 and integers alone.
        x = x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
        bias = bias.to(dtype) if bias is not None else None
    if x.dtype != dtype:
        raise RuntimeError(f"expected the input and the weight to have the same dtype, got {x.dtype} and {dtype}")
    # A BLAS sums a transposed operand in another order: the same numbers give the same bits.
    x = x.contiguous()
    use = owned.open()
    apply = OwnedLinearFunction.apply if torch._C._are_functorch_transforms_active() else _apply
    y = apply(x, use.ticket, bias, use)
    use.bind(y.grad_fn)
    return y
