"""The head and its loss in one: neither the logits ``[T, V]`` nor the head's gradient ``[V, H]`` exist whole.

Forward and backward each form the logits by blocks of the vocabulary. Backward takes each block's gradient to
the hidden states, with the old rows of the weight, and to the update of these rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_megatron.kernels import without_autocast
from forge_megatron.linear import Attached, ForgeLinear, Use, has_gradient_hook, is_callers, open_use
from forge_megatron.linear.untraced import untraced
from forge_megatron.vocab.logits import Head, LogitGradient, Loss

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _TokenLosses(torch.autograd.Function):
    """fp32 ``[T]``. ``source`` is an owned weight's ticket, or a weight whose gradient is asked for in ``.grad``."""

    @staticmethod
    def forward(ctx, x, source, bias, weight: Tensor, targets: Tensor, loss: Loss, use: Use | None) -> Tensor:
        head = Head(x, weight, bias, targets, loss)
        with without_autocast(x.device.type):
            normaliser = head.normalise()
        log_sum_exp = normaliser.log_sum_exp()
        losses = log_sum_exp - (1 - loss.label_smoothing) * normaliser.picked
        if loss.label_smoothing:
            # Infinite where a bias of -inf takes a token out of the vocabulary.
            losses = losses - loss.label_smoothing / head.vocabulary * normaliser.total
        losses = losses + loss.z_loss * log_sum_exp.square()
        ctx.weight, ctx.targets, ctx.loss, ctx.use, ctx.is_callers = weight, targets, loss, use, is_callers(x)
        # The source is saved so that autograd sees a write to it; an owned weight has a check of its own.
        ctx.save_for_backward(x, bias, log_sum_exp, source if use is None else None)
        return losses.masked_fill(targets < 0, 0.0)

    @staticmethod
    def backward(ctx, upstream: Tensor):
        use: Use | None = ctx.use
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through linear_cross_entropy, whose gradient cannot be differentiated again; for a "
                "gradient penalty take F.cross_entropy of the head's output"
            )
        x, bias, log_sum_exp, _ = ctx.saved_tensors
        wanted = use is not None and use.begin()
        x_wanted, source_wanted, bias_wanted, *_ = ctx.needs_input_grad
        # The mean over no token has an infinite gradient, which reaches none.
        upstream = upstream.masked_fill(ctx.targets < 0, 0.0)
        head = Head(x.detach(), ctx.weight, None if bias is None else bias.detach(), ctx.targets, ctx.loss)
        with without_autocast(x.device.type):
            gradient = LogitGradient(head, log_sum_exp, upstream, x_wanted=x_wanted, bias_wanted=bias_wanted)
            dweight = None
            if wanted:
                use.deliver(gradient, head.x, borrowed=ctx.is_callers)
            elif use is None and source_wanted:
                dweight = gradient.times_x().to(head.weight.dtype)
            dx, dbias = gradient.finish()
        return dx, dweight, dbias, None, None, None, None


@untraced
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor | nn.Linear,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    backend: str = "auto",
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets, ...)`` without the logits.

    An owned weight is stepped block by block while its gradient is formed; one that waits keeps ``hidden``
    and forms the blocks again at ``step()``. A weight that is not owned gets its ``.grad``. Logits, losses and
    their sums are fp32, and the logits' gradient has the dtype of ``hidden``, as a linear's output has.

    Args:
        hidden: ``[..., H]``, fp32, bf16 or fp16; under autocast it is cast as ``F.linear`` casts it.
        weight: ``[V, H]``, or the head's module, whose bias is then used, and whose forward must be ``nn.Linear``'s.
        targets: int64 ``[...]``, below V, or below ``V * tp_group.size()``.
        bias: ``[V]``.
        ignore_index: tokens with this target have no loss and no gradient.
        label_smoothing: as ``F.cross_entropy``'s, from 0 to 1.
        z_loss: adds ``z_loss * logsumexp²`` to the loss of each token (PaLM, section 5).
        reduction: ``"mean"`` over the tokens that have a loss (NaN if none has), ``"sum"`` or ``"none"``.
        backend: ``"auto"``, ``"triton"`` or ``"reference"``.
        tp_group: the ranks that share the vocabulary; each has V rows of it, in their order, and the same hidden
            states and targets. As behind a column-parallel linear, each rank's gradient of ``hidden`` is a part,
            to be all-reduced (or reduce-scattered, with sequence parallelism) by what made ``hidden``.

    Returns:
        fp32, 0-dim, or of the shape of ``targets`` for ``"none"``.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, a value without a meaning.
        NotImplementedError: a head whose call is more than ``F.linear`` of its weight and bias.
        IndexError: a target outside the vocabulary; on a GPU it is a device-side assertion, as torch's.
    """
    if isinstance(weight, nn.Module):
        module = weight
        _expect_linear(module)
        weight, bias = module.weight, module.bias if bias is None else bias
        if isinstance(module, Attached):
            module.owner_in_forward()
    _check(hidden, weight, targets, bias, label_smoothing, z_loss, reduction)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif dtype != weight.dtype:
        raise TypeError(f"hidden is {dtype} and the weight {weight.dtype}; cast one, or use autocast")
    tokens = targets.reshape(-1)
    loss = Loss(label_smoothing, z_loss, backend, tp_group)
    _check_targets(tokens, weight.shape[0] * loss.ranks, ignore_index)
    # The caller may write the next batch to its targets; an ignored one is outside the vocabulary.
    tokens = tokens.masked_fill(tokens == ignore_index, -1)
    x = hidden.reshape(tokens.shape[0], weight.shape[1]).to(dtype).contiguous()
    use = None if has_gradient_hook(weight) else open_use(weight)
    losses = _TokenLosses.apply(x, weight if use is None else use.ticket, bias, weight.detach(), tokens, loss, use)
    if use is not None:
        use.bind(losses.grad_fn)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / (tokens >= 0).sum() if reduction == "mean" else losses.sum()


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` as a module around a head: ``loss = module(hidden, targets)``.

    Args:
        head: the model's ``nn.Linear``, shared with the model; attach the model as always.
        options: of :func:`linear_cross_entropy`.
    """

    def __init__(self, head: nn.Linear, **options):
        super().__init__()
        self.head = head
        self.options = options

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.head, targets, **self.options)


def _expect_linear(head: nn.Module) -> None:
    """Raises unless a call of ``head`` is ``F.linear`` of its weight and bias."""
    kind = type(head).__name__
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the head is a {kind}; give an nn.Linear, or a weight [V, H] and bias=")
    more = None
    if "forward" in vars(head) or type(head).forward not in (nn.Linear.forward, ForgeLinear.forward):
        more = "a forward of its own"
    elif head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        # weight_norm, spectral_norm and prune of torch.nn.utils make the weight in one.
        more = "hooks, which run where it is called"
    if more is not None:
        raise NotImplementedError(
            f"the head, a {kind}, has {more}, and linear_cross_entropy does not call it; take F.cross_entropy of its "
            "output, or give its weight and bias= where they are all of it"
        )


def _check(hidden, weight, targets, bias, label_smoothing, z_loss, reduction) -> None:
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, the weight {list(weight.shape)} and targets {list(targets.shape)}; "
            "expected [..., H], [V, H] and [...]"
        )
    if targets.dtype is not torch.int64:
        raise TypeError(f"targets are {targets.dtype}; class probabilities are not built, give int64 ids")
    if hidden.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        raise TypeError(f"hidden is {hidden.dtype} and the weight {weight.dtype}; use float32, bfloat16 or float16")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"the bias is {list(bias.shape)}, expected [{weight.shape[0]}]")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing!r}; give a number from 0 to 1")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss={z_loss!r}; give a finite number of at least 0")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; use 'mean', 'sum' or 'none'")


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    inside = (targets == ignore_index) | ((targets >= 0) & (targets < vocabulary))
    if targets.device.type != "cpu":
        torch._assert_async(inside.all(), f"a target is outside the vocabulary of {vocabulary}")
    elif not inside.all():
        raise IndexError(f"target {targets[~inside][0].item()} is outside the vocabulary of {vocabulary}")
