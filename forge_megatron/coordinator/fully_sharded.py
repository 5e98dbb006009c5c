"""Weights sharded by the user's own ``fully_shard`` (FSDP2): each reduced shard is stepped where it arrives.

FSDP2 calls a sharded parameter's post-accumulate-grad hooks when the group's reduce-scatter (and, with a replicated
mesh dimension, its all-reduce) has been issued, with that stream current: what a hook launches runs after the
reduction, beside the rest of backward, and FSDP2's own wait at the end of backward covers it. The shards of a group
are views of one buffer. The group is stepped by one launch at the last of them, and dropped.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from forge_megatron import kernels
from forge_megatron.coordinator.shards import (
    ShardGroup,
    compare_over_ranks,
    expect_managed,
    expect_reduced,
    forget_backward,
)
from forge_megatron.kernels import local
from forge_megatron.linear.half_steps import (
    failed_after_updates,
    rolled_back_after_updates,
    scaled_updates,
    zeroed_after_updates,
)
from forge_megatron.linear.owned import in_backward, in_function_forward


class Client(Protocol):
    """What stepping in backward asks of the optimizer."""

    def before_updates(self) -> None:
        """Writes the hyperparameters: weights are about to be updated."""


class FullySharded:
    """Steps sharded parameters in the backward that reduces their gradients, or leaves them to ``step()``.

    A parameter waits if every one does (``waits``), or if its module ran more than once since the last step: FSDP2
    then reduces a part of its gradient for each call.

    Args:
        groups: from :func:`find_shards`.
        waits: every parameter waits (clipping, accumulation, a late scale).
        micro_batches: backward passes that reduce gradients between two steps; None: any number.
        backend: of the kernels.
        client: weakly held.
    """

    def __init__(
        self,
        groups: Sequence[ShardGroup],
        *,
        waits: bool,
        micro_batches: int | None,
        backend: str,
        client: Client,
    ):
        self._groups = list(groups)
        self._waits = waits
        self._micro_batches = micro_batches
        self._backend = backend
        self._client = weakref.ref(client)
        self._labels: Mapping[Tensor, str] = {}
        self._slots: Mapping[Tensor, kernels.Slot] = {}
        self._states: Mapping[Tensor, dict[str, Tensor]] = {}
        self.group_of = {p: group for group in groups for p in group.padded}
        self._calls: Counter[torch.nn.Module] = Counter()
        self._stepped: dict[Tensor, None] = {}
        self._waiting: dict[Tensor, None] = {}
        self._collected: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        # After the hyperparameters were written, for groups that are reduced on another stream.
        self._written: torch.cuda.Event | None = None
        # Micro-batches are numbered on; the window's first one is `_first`.
        self._micro_batch = self._first = 0
        self._reduced = False
        self._tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._broken: str | None = None
        self._handles: dict[object, torch.utils.hooks.RemovableHandle] = {}
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._watch_forwards()

    # ---- what the optimizer calls

    def connect(
        self,
        labels: Mapping[Tensor, str],
        slots: Mapping[Tensor, kernels.Slot],
        states: Mapping[Tensor, dict[str, Tensor]],
    ) -> None:
        """Takes each parameter's name, slot and state; the mappings are the optimizer's own.

        Raises:
            NotImplementedError: a parameter that could not be stepped exactly; nothing has changed.
        """
        for p, label in labels.items():
            expect_managed(label, p, self.group_of)
        self._labels, self._slots, self._states = labels, slots, states

    def reasons(self) -> dict[Tensor, str]:
        """What the table of coverage says of each sharded parameter."""
        how = "its reduced shard waits for step()" if self._waits else "stepped where its reduced shard arrives"
        return dict.fromkeys(self.group_of, f"sharded: {how}")

    def compare(self, what: str, facts: dict[str, object]) -> None:
        """Raises ``ValueError`` where ranks with shards of one model do ``what`` and differ in ``facts``."""
        compare_over_ranks(what, self._groups, facts)

    def expect_managed(self, p: Tensor) -> None:
        """Raises for a parameter that becomes trainable beside sharded ones, and whose gradient nobody reduces."""
        expect_managed(self._labels[p], p, self.group_of)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Steps the trainable ones of ``params`` on arrival from now on."""
        for p in params:
            if p in self.group_of and p.requires_grad and p not in self._handles:
                hook = partial(_arrived, weakref.ref(self))
                self._handles[p] = p.register_post_accumulate_grad_hook(hook)

    def release(self) -> None:
        _remove(self._handles)

    @property
    def updated(self) -> str | None:
        """The name of a weight that was updated since the last step, or None."""
        return next((self._labels[p] for p in self._stepped), None)

    def name_of_stepped(self, p: Tensor) -> str | None:
        """The name of ``p`` if it was updated since the last step; its ``.grad`` is gone."""
        return self._labels[p] if p in self._stepped else None

    def expect_nothing_pending(self, what: str) -> None:
        """Raises if a gradient waits for ``step()``, or an update was made that it has not closed."""
        for p in (*self._stepped, *self._waiting):
            raise RuntimeError(f"{self._labels[p]}: a backward is pending; call step() before you {what}")

    def expect_usable(self) -> None:
        """Raises if the last backward failed, is running, or has left gradients that are not reduced."""
        self._note_failures(closing=True)
        if self._broken is not None:
            raise RuntimeError(self._broken)
        expect_reduced(self._groups, self._labels)

    def refuse_scaled_updates(self) -> None:
        """GradScaler in immediate mode: raises; weights that were updated with scaled gradients stay an error."""
        if not self._handles:
            return  # nothing is sharded, or detached
        self.expect_usable()
        error = scaled_updates(self.updated)
        if self._stepped:
            self._broken = error
        raise RuntimeError(error)

    def close_window(self) -> None:
        """After ``step()``: gradients are dropped, and what a forward gathered is gathered anew."""
        for group in {self.group_of[p] for p in self._waiting}:
            group.updates += 1
        self._calls.clear()
        self._drop()
        self._reshard()

    def _reshard(self) -> None:
        for group in self._groups:
            for module in group.modules:
                module.reshard()

    def discard_window(self) -> None:
        """``zero_grad()``: drops what waits; refuses to hide an update that has already been made."""
        self._note_failures(closing=True)
        forget_backward(self._groups)
        if not self._stepped:
            self._broken = None
            self._drop()
        elif self._broken is None:
            raise RuntimeError(zeroed_after_updates(self.updated))

    def roll_back(self, *, accept: bool) -> bool:
        """Drops everything that waits. Updates that have been made stay, and are an error unless accepted.

        Returns:
            False: weights have been updated since the last ``step()``, which is an error on the next use.
        """
        self._note_failures(closing=True)
        if accept or not self._stepped:
            self.restored()
            return True
        forget_backward(self._groups)
        if self._broken is None:
            self._broken = rolled_back_after_updates(len(self._stepped), len(self.group_of), self.updated)
        return False

    def restored(self) -> None:
        """After ``load_state_dict``: whatever a failed backward did is gone."""
        self._broken = None
        forget_backward(self._groups)
        self.close_window()

    def _drop(self) -> None:
        for p in (*self._waiting, *self._collected):
            p.grad = None
        self._waiting.clear()
        self._collected.clear()
        self._stepped.clear()
        self._tasks.clear()
        self._written = None
        self._first = self._micro_batch + self._reduced

    # ---- forward

    def _watch_forwards(self) -> None:
        for group in self._groups:
            for module in group.modules:
                hook = torch.compiler.disable(partial(_forwarded, weakref.ref(self), group))
                self._handles[group, module] = module.register_forward_hook(hook)

    def forwarded(self, group: ShardGroup, module: torch.nn.Module, output) -> None:
        """Counts a call of ``module``, and has its backward checked before anything is reduced."""
        if in_backward() or not (torch.is_grad_enabled() or in_function_forward()):
            return  # a recomputation, or no backward will follow
        if not any(p.requires_grad for p in group.padded):
            return
        group.expect_not_replaced(self._labels)
        if self._reduced:
            self._micro_batch += 1
            self._reduced = False
        self._calls[module] += 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(_entered, weakref.ref(self), group, group.updates, self._micro_batch))
                return

    # ---- backward

    def entered(self, group: ShardGroup, updates: int, micro_batch: int) -> None:
        """A backward has come to a group whose forward saw ``updates`` of its weights.

        Raises:
            RuntimeError: what this backward reduces could not be stepped exactly; nothing has changed.
        """
        label = next((self._labels[p] for p in group.padded if p in self._labels and p.requires_grad), None)
        if label is None:
            return
        self._note_failures()
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._micro_batches is not None and micro_batch - self._first >= self._micro_batches:
            raise RuntimeError(
                f"{label}: backward number {micro_batch - self._first + 1} since the last step(), with "
                f"accumulation_steps={self._micro_batches}; call step() after each window, or attach with more "
                "accumulation_steps"
            )
        if updates != group.updates:
            raise RuntimeError(
                f"{label}: it was updated after the forward that this backward belongs to, which multiplied with the "
                "old value; run the forward again after step(), or attach with waiting=True"
            )
        self._begin()

    def arrived(self, p: Tensor) -> None:
        """The reduced gradient of ``p`` is in ``p.grad``."""
        if p.grad is None:
            return
        if not p.requires_grad:
            p.grad = None  # frozen or paused since FSDP2 last looked
            return
        self._begin()
        if p in self._stepped:
            raise RuntimeError(
                f"{self._labels[p]}: another part of its gradient arrived after it had been updated; attach with "
                "waiting=True"
            )
        self._reduced = True
        several = any(self._calls[module] > 1 for module in self.group_of[p].modules)
        if not (self._waits or several or p in self._waiting):
            self._collect(p)
            return
        self._waiting[p] = None
        if several or self._micro_batches != 1:
            # FSDP2 adds the next backward's gradient to it in place: in 16 bits small terms would be lost.
            p.grad_dtype = None
            p.grad = p.grad.float()

    def _collect(self, p: Tensor) -> None:
        shard = local(p.grad)
        if self._collected and not _share_storage(local(self._collected[-1].grad), shard):
            self._launch()  # the rest of a group of which some parameters had no gradient
        self._collected.append(p)
        if shard.is_cuda:
            self._stream = torch.cuda.current_stream(shard.device)
        end = shard.storage_offset() + self.group_of[p].padded[p]
        if end * shard.element_size() == shard.untyped_storage().nbytes():
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        """Steps what was collected, on the stream that reduced it, and drops its gradients."""
        collected, self._collected = self._collected, []
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._client().before_updates()
            self._order_after_the_hyperparameters()
            kernels.step([self._slots[p] for p in collected], [local(p.grad) for p in collected], backend=self._backend)
            for p in collected:
                p.grad = None
        for p in collected:
            torch.autograd.graph.increment_version((p, local(p)))
            self._states[p]["step"].add_(1)
            self._stepped[p] = None
        for group in {self.group_of[p] for p in collected}:
            group.updates += 1

    def _order_after_the_hyperparameters(self) -> None:
        if self._stream is None:
            return
        if self._written is None:
            self._written = self._stream.record_event()
        self._stream.wait_event(self._written)

    def _begin(self) -> None:
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        reference = weakref.ref(self)

        def finished() -> None:
            shards = reference()
            if shards is not None:
                shards.finished(task)

        # Only the engine holds it: it dies with the graph task, be that finished or failed.
        self._tasks[task] = weakref.ref(finished)
        torch.autograd.Variable._execution_engine.queue_callback(finished)

    def finished(self, task: int) -> None:
        if self._collected:
            self._launch()
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._tasks.pop(task, None)

    def _note_failures(self, *, closing: bool = False) -> None:
        if closing and in_backward():
            raise RuntimeError("called inside backward, which updates weights itself; call it after backward")
        failed = [task for task, reference in self._tasks.items() if closing or reference() is None]
        if not failed:
            return
        self._tasks.clear()
        if self._stepped:
            self._broken = failed_after_updates(len(self._stepped), len(self.group_of), self.updated)
        else:
            self._broken = "the last backward failed; call zero_grad() to discard the window"


def _forwarded(reference, group, module, args, output) -> None:
    shards = reference()
    if shards is not None:
        shards.forwarded(group, module, output)


def _entered(reference, group, updates, micro_batch, grad) -> None:
    shards = reference()
    if shards is not None:
        shards.entered(group, updates, micro_batch)


def _arrived(reference, p: Tensor) -> None:
    shards = reference()
    if shards is not None:
        shards.arrived(p)


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _remove(handles: dict) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
