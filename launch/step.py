"""Forward, backward and loss of one optimizer step on Megatron's schedules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import tee

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from launch.config import Recipe


def _loss(mask: Tensor, per_token: bool, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum and token count of a micro-batch: ``losses [micro, s]``, ``mask [micro, s]``.

    Megatron divides the first value in place, so that what is logged is a copy. Context ranks have a part of each
    sequence, and Megatron averages their gradients: the mean is over the tokens of all of them.
    """
    total = (losses.float() * mask).sum()
    tokens = mask.sum()
    sums = torch.stack([total.detach().clone(), tokens])
    if not per_token and (ranks := parallel_state.get_context_parallel_world_size()) > 1:
        total, tokens = total * ranks, tokens.clone()
        dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return total, tokens.to(torch.int), sums


def _forward(batches: Iterator[dict[str, Tensor]], model) -> tuple[Tensor, partial]:
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"], model.config.calculate_per_token_loss)


def connect(chunks: list, optimizer) -> None:
    """Give the schedules the hooks that they call by way of the model's config."""
    config = chunks[0].config
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss


def run(recipe: Recipe, chunks: list, batches: Iterator, micro_batches: int, forward_only: bool = False) -> Tensor:
    """All micro-batches of a step; the gradients are reduced and ready for the optimizer.

    Returns:
        fp32 ``[2]`` on the device: sum of the losses in nats, number of tokens, of this rank. The loss of a
        pipeline is its last stage's; of the others it is a sum over no tokens.
    """
    sums = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=list(tee(batches, len(chunks))) if len(chunks) > 1 else batches,
        model=chunks,
        num_microbatches=micro_batches,
        seq_length=recipe.data.sequence_length,
        micro_batch_size=recipe.batch.micro,
        forward_only=forward_only,
    )
    return torch.stack(sums).sum(0) if sums else torch.zeros(2, device=next(chunks[0].parameters()).device)


def reduce(sums: Tensor, stop: bool) -> tuple[float, bool]:
    """The mean loss over all ranks, and whether any rank was asked to stop: one collective."""
    packed = torch.cat([sums.double(), sums.new_tensor([float(stop)]).double()])
    dist.all_reduce(packed)
    total, tokens, asked = packed.tolist()
    return total / max(tokens, 1.0), asked > 0
