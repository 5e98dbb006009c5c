"""What Megatron tells its DDP wrapper about gradients, and an owned weight has to hear too.

Wraps methods of the DDP *instance*: Megatron's training loop overwrites the hooks of the model config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer


def observe(chunk: nn.Module, optimizers: Sequence[ForgeMegatronOptimizer]) -> None:
    """Passes the per-token scale, which Megatron applies to its gradient buffers, on to the owned weights.

    Args:
        chunk: the DDP wrapper of one model chunk; a module without ``scale_gradients`` is left alone.
        optimizers: told the factor.
    """
    scale_gradients = getattr(chunk, "scale_gradients", None)
    if scale_gradients is None:
        return

    def scale_all(scaling_factor) -> None:
        scale_gradients(scaling_factor)
        for optimizer in optimizers:
            optimizer.set_gradient_scale(scaling_factor)

    chunk.scale_gradients = scale_all


def renew_hooks(chunk: nn.Module) -> None:
    """Makes anew the nodes by which Megatron's DDP hears of a gradient: autograd runs a leaf's on the stream it is of.

    Args:
        chunk: the DDP wrapper of one model chunk, between two steps.
    """
    # A node lives as long as somebody has it.
    chunk.grad_accs.clear()
    for parameter in chunk.params_with_grad:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(chunk._make_backward_post_hook(parameter))
        chunk.grad_accs.append(node)
