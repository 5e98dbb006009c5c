"""Liger's kernels in a Hugging Face model: RMSNorm, rotary embedding and SwiGLU; its loss of head and labels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

#: Kinds of models that it is applied to here.
KINDS = ("llama", "qwen3")


def apply(model: nn.Module) -> None:
    """Liger's kernels in this model, and in no other of the process.

    Liger's own call gives them to the instance, but for the rotary embedding, and to the classes of models made later.

    Raises:
        ValueError: a kind that is not one of ``KINDS``.
        ModuleNotFoundError: liger-kernel is not installed.
    """
    kind = model.config.model_type
    if kind not in KINDS:
        raise ValueError(f"liger: kernels for kind={kind!r} are not built in; use one of: {', '.join(KINDS)}")
    from liger_kernel import transformers as liger

    of_kind = vars(sys.modules[type(model).__module__])
    before = dict(of_kind)
    try:
        patch = getattr(liger, f"apply_liger_kernel_to_{kind}")
        patch(rope=False, fused_linear_cross_entropy=False, model=model)
    finally:
        of_kind.update(before)
    for layer in model.base_model.layers:
        attention = layer.self_attn
        forward = _with(type(attention).forward, apply_rotary_pos_emb=liger.liger_rotary_pos_emb)
        attention.forward = MethodType(forward, attention)


def _with(function: Callable, **names) -> FunctionType:
    """A copy of ``function`` that finds ``names`` where it would have found its module's."""
    plain = inspect.unwrap(function)
    its = {**plain.__globals__, **names}
    made = FunctionType(plain.__code__, its, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def causal_lm_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of ``tokens``, int64 ``[B, S]``, by Liger's fused linear cross entropy; it waits for the device."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = model.base_model(input_ids=tokens, use_cache=False)[0]
    # As Liger's models do: every token, the last with a label that is ignored.
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    weight = model.get_output_embeddings().weight
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden.flatten(0, 1), labels.flatten())
