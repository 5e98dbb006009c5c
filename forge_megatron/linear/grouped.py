"""Linear layers of experts whose weights are one tensor, and whose tokens lie in the order of their experts."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_megatron.kernels import GroupedRows, without_autocast
from forge_megatron.linear.attached import Attached
from forge_megatron.linear.function import is_callers
from forge_megatron.linear.owned import Use, open_use
from forge_megatron.linear.untraced import untraced


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies each expert's tokens with its matrix.

    Args:
        x: ``[T, K]``.
        weight: ``[E, K, N]``.
        ends: int32 ``[E]``; see :class:`GroupedLinear`.

    Returns:
        ``[T, N]``.
    """
    if x.shape[0] == 0:
        return x @ weight[0]
    if x.device.type != "cpu" and all(extent * x.element_size() % 16 == 0 for extent in weight.shape[1:]):
        return F.grouped_mm(x, weight, offs=ends)
    # torch's own wants rows of whole 16 bytes.
    spans = itertools.pairwise([0, *ends.tolist()])
    return torch.cat([x[begin:end] @ matrix for (begin, end), matrix in zip(spans, weight, strict=True)])


class GroupedLinear(nn.Module):
    """The linear layers, without bias, of several experts.

    Args:
        experts: E, at least 1.
        in_features: I.
        out_features: O.

    Attributes:
        weight: ``[E, O, I]``, initialised as ``nn.Linear``'s.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        if min(experts, in_features, out_features) < 1:
            raise ValueError(
                f"experts={experts}, in_features={in_features}, out_features={out_features}; give 1 or more"
            )
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"experts={experts}, in_features={inputs}, out_features={outputs}"

    def forward(self, input: Tensor, ends: Tensor) -> Tensor:
        """Each expert's matrix applied to its tokens.

        Args:
            input: ``[T, I]`` in the weight's dtype, the tokens in the order of their experts; T may be 0.
            ends: int32 ``[E]`` on the same device, non-decreasing, where the tokens of each expert end; the last is
                T. It is not read on the host of a GPU.

        Returns:
            ``[T, O]``.

        Raises:
            ValueError: on a shape, dtype or device that does not fit; on the CPU, on a last end that is not T.
        """
        self._expect_fitting(input, ends)
        return grouped_mm(input, self.weight.transpose(1, 2), ends)

    def _expect_fitting(self, input: Tensor, ends: Tensor) -> None:
        weight = self.weight
        if input.dim() != 2 or input.shape[1] != weight.shape[2] or input.dtype is not weight.dtype:
            raise ValueError(
                f"the input is {list(input.shape)} {input.dtype}; give [tokens, {weight.shape[2]}] {weight.dtype}"
            )
        if ends.shape != weight.shape[:1] or ends.dtype is not torch.int32 or ends.device != input.device:
            raise ValueError(
                f"ends is {list(ends.shape)} {ends.dtype} on {ends.device}; give int32 [{weight.shape[0]}] on "
                f"{input.device}: torch.cumsum(tokens_per_expert, 0, dtype=torch.int32)"
            )
        if ends.device.type == "cpu" and int(ends[-1]) != input.shape[0]:
            raise ValueError(f"the last of ends is {int(ends[-1])}, and there are {input.shape[0]} tokens")


class ForgeGroupedLinear(Attached, GroupedLinear):
    """``GroupedLinear`` that hands its weight gradient to the owner of its weight."""

    plain = GroupedLinear

    @untraced
    def forward(self, input: Tensor, ends: Tensor) -> Tensor:
        if self.owner_in_forward() is None:
            return super().forward(input, ends)
        self._expect_fitting(input, ends)
        return owned_grouped_linear(input, self.weight, ends)


def owned_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """Each expert's matrix applied to its tokens, by an owned weight, which is stepped in backward.

    Args:
        x: ``[T, I]``.
        weight: ``[E, O, I]``; ``[E, I, O]`` if ``transposed``.
        ends: as :meth:`GroupedLinear.forward`'s.
        transposed: the layout of the weight.

    Returns:
        ``[T, O]``.
    """
    use = open_use(weight)
    y = OwnedGroupedFunction.apply(x, use.ticket, ends, use, transposed)
    use.bind(y.grad_fn)
    return y


class OwnedGroupedFunction(torch.autograd.Function):
    """Every expert's ``dX = dY W`` from before the update, then the factors of all experts to the weight's sink."""

    @staticmethod
    def forward(ctx, x: Tensor, ticket: Tensor | None, ends: Tensor, use: Use, transposed: bool) -> Tensor:
        ctx.use, ctx.transposed = use, transposed
        ctx.save_for_backward(ends, *(() if ticket is None else (x,)))
        weight = use.weight.to(x.dtype)
        return grouped_mm(x, weight if transposed else weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx, dy: Tensor):
        use: Use = ctx.use
        wanted = use.begin()
        ends, *kept = ctx.saved_tensors
        dx = None
        with without_autocast(dy.device.type):
            # A reduction's gradient is expanded, whose strides torch's grouped product refuses.
            dy = dy.contiguous()
            if ctx.needs_input_grad[0]:
                weight = use.weight.to(dy.dtype)
                dx = grouped_mm(dy, weight.transpose(1, 2) if ctx.transposed else weight, ends)
            if wanted:
                (x,) = kept
                bounds = F.pad(ends, (1, 0))
                if ctx.transposed:
                    # A factor in dY's place is never copied where it is kept.
                    rows = x.clone() if is_callers(x) else x
                    use.deliver(GroupedRows(rows, bounds, swapped=True), dy)
                else:
                    use.deliver(GroupedRows(dy, bounds), x, borrowed=is_callers(x))
        return dx, None, None, None, None
