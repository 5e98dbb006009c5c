"""The loss of a Hugging Face causal language model through its fused head."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from forge_megatron.vocab.cross_entropy import linear_cross_entropy

#: Keys of a config that say that logits are more than the head's product, or the loss more than theirs.
_CHANGES = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "output_router_logits": False,
    "z_loss_coefficient": 0.0,
}


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    loss_options: dict | None = None,
    **inputs,
) -> Tensor:
    """What ``model(input_ids, labels=labels).loss`` is, without the logits.

    Args:
        model: a ``transformers`` model with a ``base_model`` and an output embedding (``...ForCausalLM``).
        input_ids: int64 ``[B, S]``.
        labels: int64 ``[B, S]``, -100 where there is none; the token before each predicts it.
        num_items_in_batch: divides the sum of the losses, in place of the number of labels.
        loss_options: ``label_smoothing``, ``z_loss`` or ``backend`` of :func:`linear_cross_entropy`.
        inputs: of the model (``attention_mask``, ``position_ids`` ...).

    Returns:
        0-dim fp32.

    Raises:
        NotImplementedError: the model does more between ``base_model``, its head and the loss, or has another loss.
    """
    _expect_head_and_loss(model)
    hidden = model.base_model(input_ids=input_ids, use_cache=False, **inputs)[0]
    reduction = "mean" if num_items_in_batch is None else "sum"
    head, options = model.get_output_embeddings(), loss_options or {}
    loss = linear_cross_entropy(hidden[:, :-1], head, labels[:, 1:], reduction=reduction, **options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _expect_head_and_loss(model: nn.Module) -> None:
    """Raises unless the model's loss is, as far as can be told, transformers' own of the head's product."""
    name = type(model).__name__
    config = model.config.get_text_config()
    for key, neutral in _CHANGES.items():
        value = getattr(config, key, neutral)
        if value not in (neutral, None):
            raise NotImplementedError(
                f"{name}: config.{key}={value!r} changes what comes after the head, which is not built; use "
                "the model's own loss"
            )
    # BERT has a dense layer and a norm between the two.
    parts = model.base_model, model.get_output_embeddings()
    other = next((child for child, module in model.named_children() if module not in parts), None)
    if other is not None:
        raise NotImplementedError(
            f"{name} has a {other} beside its base_model and its head, which would not be called; use "
            "linear_cross_entropy of the hidden states that its head takes"
        )
    # BART's decoder and others compute a loss of their own, of labels that are not shifted.
    forward = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    loss = getattr(model.loss_function, "__name__", model.loss_function)
    if forward is None or "loss_function" not in forward.co_names or loss != "ForCausalLMLoss":
        own = loss if loss != "ForCausalLMLoss" else "in its forward"
        raise NotImplementedError(
            f"{name} has a loss of its own ({own}), and causal_lm_loss is transformers' ForCausalLMLoss; use "
            "linear_cross_entropy with its targets"
        )
