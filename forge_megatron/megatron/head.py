"""``--forge-fused-head``: the output layer and Megatron's loss in one, by blocks of this rank's vocabulary.

Megatron forms the logits ``[s, b, V / tp]`` in the output layer and hands them to the loss. Here the output layer
hands the hidden states on, and the loss forms the logits block by block (:mod:`forge_megatron.vocab`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import contextmanager

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from forge_megatron.megatron.conversion import unwrap
from forge_megatron.megatron.layers import ForgeColumnParallelLinear
from forge_megatron.vocab import linear_cross_entropy

_FORWARD = inspect.signature(GPTModel.forward)
# Both read the logits.
_READERS = ("mtp_num_layers", "use_mup")


class ForgeOutputLayer(ForgeColumnParallelLinear):
    """Megatron's output layer, which inside :meth:`left_to_the_loss` returns its input.

    Attributes:
        is_left: the loss multiplies in its place.
    """

    is_left = False

    @contextmanager
    def left_to_the_loss(self):
        self.is_left = True
        try:
            yield
        finally:
            self.is_left = False

    def forward(self, input_: Tensor, *args, **kwargs):
        return (input_, None) if self.is_left else super().forward(input_, *args, **kwargs)


class ForgeGPTModel(GPTModel):
    """Megatron's GPT, which with labels never forms the logits; without labels it returns them as always."""

    def forward(self, *args, **kwargs) -> Tensor:
        given = _FORWARD.bind(self, *args, **kwargs).arguments
        if given.get("labels") is None or given.get("output_processor") is not None:
            return super().forward(*args, **kwargs)
        with self.output_layer.left_to_the_loss():
            return super().forward(*args, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """``[b, s]`` in fp32; ``logits`` are the hidden states ``[s, b, h]`` where the output layer left them so.

        A label below 0 has loss 0 (Megatron masks such tokens by ``loss_mask``).
        """
        head = self.output_layer
        if not head.is_left:
            return super().compute_language_model_loss(labels, logits)
        if head.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(logits, tensor_parallel_output_grad=True, group=head.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(logits, group=head.tp_group)
        shared = self.share_embeddings_and_output_weights
        losses = linear_cross_entropy(
            hidden,
            self.shared_embedding_or_output_weight() if shared else head.weight,
            labels.transpose(0, 1).clamp(min=-1),
            bias=head.bias,
            ignore_index=-1,
            reduction="none",
            tp_group=head.tp_group,
        )
        return losses.transpose(0, 1).contiguous()


def models_with_head(model_chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """The chunks whose head :func:`fuse` can fuse; the others have none.

    Raises:
        NotImplementedError: a model, or a switch, that reads the logits, by name.
    """
    models = [model for model in map(unwrap, model_chunks) if getattr(model, "post_process", True)]
    for model in models:
        if type(model) not in (GPTModel, ForgeGPTModel):
            raise NotImplementedError(f"the fused head needs megatron.core's GPTModel, not {type(model).__name__}")
        if type(model.output_layer) not in (ColumnParallelLinear, ForgeColumnParallelLinear, ForgeOutputLayer):
            kind = type(model.output_layer).__name__
            raise NotImplementedError(f"the fused head needs a ColumnParallelLinear, and output_layer is a {kind}")
        for switch in _READERS:
            value = getattr(model.config, switch, None)
            if value:
                raise NotImplementedError(
                    f"{switch}={value} reads the logits, which the fused head never forms; turn one of them off"
                )
    return models


def fuse(model: nn.Module) -> None:
    """Gives a model of :func:`models_with_head` the fused head, in place."""
    model.__class__ = ForgeGPTModel
    model.output_layer.__class__ = ForgeOutputLayer
