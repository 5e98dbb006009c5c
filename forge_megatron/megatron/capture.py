"""Megatron's training step as one CUDA graph: its schedule's forward and backward, the updates, norm and clipping.

What is not in the graph is the step of Megatron's own optimizer, whose learning rate and step count are numbers of the
host: the few parameters that FORGE does not own (norms, biases) are stepped by its launches behind each replay, with
the bits of an eager step whichever optimizer that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from forge_megatron.megatron.capturable import expect_capturable, generators
from forge_megatron.megatron.ddp import renew_hooks
from forge_megatron.megatron.optimizer import ForgeChainedOptimizer


def capture_train_step(
    optimizer: ForgeChainedOptimizer,
    model_chunks: Sequence[nn.Module],
    forward_backward: Callable,
    *,
    warmup: int = 3,
) -> CapturedTrainStep:
    """Makes a function that runs a whole training step, most of it as one CUDA graph.

    >>> def forward_backward(batches):  # as Megatron's train_step() calls it, with what it is given
    ...     return get_forward_backward_func()(forward_step_func=..., data_iterator=iter(batches), ...)
    >>> train_step = forge_megatron.megatron.capture_train_step(optimizer, [chunk], forward_backward)
    >>> for batches in loader:
    ...     losses, update_successful, grad_norm = train_step(batches)
    ...     scheduler.step(1)

    It takes the place of ``zero_grad_buffer()``, ``zero_grad()``, forward and backward, and ``optimizer.step()``. The
    first calls for each shape, and each number of micro-batches, run as they are, one more captures, and all after that
    replay. Schedules, step counts, bias corrections, the bits of stochastic rounding and dropout masks are those of
    each step; evaluation, checkpoints and eager steps may lie between. Random states are loaded before the first
    call, or in place (``generator.set_state``).

    Args:
        optimizer: of :func:`~forge_megatron.megatron.build.get_forge_optimizer`.
        model_chunks: the one that it is of, in Megatron's DDP.
        forward_backward: all micro-batches of a step. Of tensors on the GPU, at any depth of tuples, lists and dicts;
            returns tensors, at any depth. What else it does on the host is done while it is captured and not again.
        warmup: calls that run as they are.

    Raises:
        NotImplementedError: what cannot be captured, each by name with its value.
        ValueError: the parameters are not on one CUDA device.
    """
    chunk = expect_capturable(optimizer, model_chunks)
    return CapturedTrainStep(optimizer, chunk, forward_backward, warmup)


class CapturedTrainStep:
    """A training step that is replayed; see :func:`capture_train_step`."""

    def __init__(self, optimizer: ForgeChainedOptimizer, chunk: nn.Module, forward_backward: Callable, warmup: int):
        (self._pair,) = optimizer.chained_optimizers
        self._chunk = chunk
        self._forward_backward = forward_backward
        forge = self._pair.forge
        self._on_device = forge.capture(self._step_on_device, warmup=warmup, generators=generators())
        with self._on_device.beside():
            renew_hooks(chunk)
        if self._pair.waits:
            forge.skip_whole_steps()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, bool, Tensor]:
        """One step.

        Returns:
            What ``forward_backward`` returned, as copies; whether the step was taken, which a norm that is not finite
            prevents where updates wait for it, and for which alone the host then waits; the gradient norm before
            clipping, 0-dim fp64 on the device.
        """
        forge = self._pair.forge
        skipped = forge.skipped_steps if self._pair.waits else 0
        made, norm = self._on_device(*args, **kwargs)
        if self._pair.waits and forge.skipped_steps != skipped:
            return made, False, norm
        return made, self._pair.step_dense(), norm

    def _step_on_device(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        self._chunk.zero_grad_buffer()
        self._pair.dense.zero_grad()
        made = self._forward_backward(*args, **kwargs)
        return made, self._pair.step_on_device()
