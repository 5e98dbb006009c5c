"""The autograd function of an owned tensor-parallel linear: ``Y = X Wᵀ + b`` and Megatron's collectives.

The order inside its backward is megatron-core's (``LinearWithGradAccumulationAndAsyncCommunication``)
with the update in the place of the weight-gradient GEMM: gather X, ``dX = dY W`` from the weight before
the update, issue dX's collective, *update*, wait for dX. The update thus hides the collective as the
GEMM did.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from forge_megatron.kernels import without_autocast
from forge_megatron.linear import Use, open_use
from forge_megatron.linear.untraced import untraced


def _gather_sequence(shard: Tensor, group: dist.ProcessGroup, *, shared: bool, async_op: bool = False):
    """All-gathers ``[s / tp, ..., h]`` along the sequence; ``shared``: into Megatron's one reused buffer."""
    shape = [shard.shape[0] * group.size(), *shard.shape[1:]]
    buffer = get_global_memory_buffer()
    whole = buffer.get_tensor(shape, shard.dtype, "mpu") if shared else shard.new_empty(shape)
    return whole, dist.all_gather_into_tensor(whole, shard.contiguous(), group=group, async_op=async_op)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class OwnedParallelLinearFunction(torch.autograd.Function):
    """The update of the weight runs between the issue and the wait of the input gradient's collective."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        ticket: Tensor | None,
        bias: Tensor | None,
        use: Use,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.use = use
        ctx.has_bias = bias is not None
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.tp_group = tp_group
        ctx.x_shape = x.shape
        if ticket is not None:
            ctx.save_for_backward(x)
        if sequence_parallel:
            x, _ = _gather_sequence(x, tp_group, shared=True)
        y = torch.matmul(x, use.weight_as(x.dtype).t())
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, dy: Tensor):
        use: Use = ctx.use
        wanted = use.begin()
        if torch.is_grad_enabled() and (ctx.allreduce_dgrad or ctx.sequence_parallel):
            raise RuntimeError(
                f"{use.owned.name}: create_graph=True through a tensor-parallel linear, whose collectives cannot be "
                "differentiated again; run a gradient penalty with tensor_model_parallel_size 1"
            )
        x_wanted, _, bias_wanted = ctx.needs_input_grad[:3]
        gathering = None
        if wanted:
            (x,) = ctx.saved_tensors
            if ctx.sequence_parallel:
                # A factor that waits for step() needs memory of its own: the next layer gathers into "mpu".
                x, gathering = _gather_sequence(x, ctx.tp_group, shared=not use.owned.waits, async_op=True)

        with without_autocast(dy.device.type):
            dx, reducing = None, None
            if x_wanted:
                dx = dy.matmul(use.weight_as(dy.dtype))
            if gathering is not None:
                gathering.wait()
            if x_wanted and ctx.allreduce_dgrad:
                reducing = dist.all_reduce(dx, group=ctx.tp_group, async_op=True)
            elif x_wanted and ctx.sequence_parallel:
                whole, dx = dx, dx.new_empty(ctx.x_shape)
                reducing = dist.reduce_scatter_tensor(dx, whole, group=ctx.tp_group, async_op=True)

            rows = _rows(dy)
            if wanted:
                # An input that autograd did not make is the user's, who may write the next batch into it.
                borrowed = not use.owned.waits if ctx.sequence_parallel else not x_wanted
                use.deliver(rows, _rows(x), borrowed=borrowed)
            dbias = rows.sum(0) if ctx.has_bias and bias_wanted else None
            if reducing is not None:
                reducing.wait()
        return dx, None, dbias, None, None, None, None


@untraced
def owned_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """One tensor-parallel linear with an owned weight.

    Args:
        x: ``[s, b, I]``, or under ``sequence_parallel`` this rank's shard ``[s / tp, b, I]``.
        weight: this rank's shard of the weight, ``[O, I]``, owned.
        bias: ``[O]`` or None.
        allreduce_dgrad: sum the input gradient over ``tp_group`` (column-parallel).
        sequence_parallel: gather ``x`` and reduce-scatter its gradient over ``tp_group``.
        tp_group: tensor-parallel group; not read where neither flag is set.

    Returns:
        ``[s, b, O]``, the whole sequence.

    Raises:
        RuntimeError: both flags at once.
    """
    if allreduce_dgrad and sequence_parallel:
        raise RuntimeError("allreduce_dgrad and sequence_parallel cannot be enabled at the same time")
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    use = open_use(weight)
    y = OwnedParallelLinearFunction.apply(x, use.ticket, bias, use, allreduce_dgrad, sequence_parallel, tp_group)
    use.bind(y.grad_fn)
    return y
