"""The loss of a Hugging Face causal language model through its fused head."""

from __future__ import annotations

from torch import Tensor, nn

from forge_megatron.vocab.cross_entropy import linear_cross_entropy

#: Keys of a config that say that logits are more than the head's product, or the loss more than theirs.
_CHANGES = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "output_router_logits": False,
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
        NotImplementedError: the model's configuration changes logits or loss after the head.
    """
    config = model.config
    for key, neutral in _CHANGES.items():
        value = getattr(config, key, neutral)
        if value not in (neutral, None):
            raise NotImplementedError(
                f"{type(model).__name__}: config.{key}={value!r} changes what comes after the head, which is not "
                f"built; use the model's own loss"
            )
    hidden = model.base_model(input_ids=input_ids, use_cache=False, **inputs)[0]
    reduction = "mean" if num_items_in_batch is None else "sum"
    head, options = model.get_output_embeddings(), loss_options or {}
    loss = linear_cross_entropy(hidden[:, :-1], head, labels[:, 1:], reduction=reduction, **options)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
