"""The book of one optimizer's owned weights: one pre-flight per graph task decides before anything changes.

A *graph task* is one run of the autograd engine (a reentrant checkpoint nests one in another). A *window*
is what lies between two ``step()`` calls. DESIGN section 2, rules 1 to 3.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forge_megatron.linear.client import Client
from forge_megatron.linear.counts import raise_counts
from forge_megatron.linear.factors import count_shared, keep_apart
from forge_megatron.linear.half_steps import (
    WAY_OUT,
    failed_after_sending,
    failed_after_updates,
    refused_after_adding,
    rolled_back_after_updates,
    scaled_updates,
    zeroed_after_updates,
)
from forge_megatron.linear.owned import OwnedWeight, Use, in_backward, lock
from forge_megatron.linear.sink import Later, Now
from forge_megatron.linear.verdict import GraphTask, Verdict

_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()
_numbers = itertools.count()


class Ledger:
    """Decides, for every weight and graph task, whether it is updated now, waits, or is not asked for.

    Args:
        now: the sink of a gradient that is complete in this graph task.
        later: the sink of factors that are not kept to ``step()`` as they are.
        waits: every weight waits (clipping, a late scale, a window of any length).
        micro_batches: backward passes allowed between two steps; None: any number. What does not wait is summed up to
            the last of them, whose backward steps it.
        client: weakly held; told before a backward changes anything.
    """

    def __init__(self, now: Now, later: Later, *, waits: bool, micro_batches: int | None, client: Client):
        self.now = now
        self.later = later
        self.waits = waits
        self.micro_batches = micro_batches
        # Strong, it would close a cycle: the optimizer holds its ledger.
        self._client = weakref.ref(client)
        self.owned: list[OwnedWeight] = []
        self.task_count = 0
        self._tasks: dict[int, GraphTask] = {}
        self.number = next(_numbers)
        self._broken: str | None = None
        self._half_stepped = False
        with lock:
            # Another thread's backward may be going through them.
            _ledgers.add(self)

    # ---- what the optimizer calls

    def expect_no_failed_backward(self, *, closing: bool = False) -> None:
        """Notices that a backward raised; drops the factors that it left.

        Args:
            closing: the window ends, so no backward may be running; otherwise another thread may run one.
        """
        if closing and in_backward():
            raise RuntimeError("called inside backward, which updates weights itself; call it after backward")
        if not self._tasks:
            # Every call of every linear comes here.
            return
        with lock:
            tasks = {task: it for task, it in self._tasks.items() if closing or it.running() is None}
            for task in tasks:
                del self._tasks[task]
        failed = {task for task, it in tasks.items() if it.wanted}
        if not failed:
            return
        for it in tasks.values():
            self._count_updates(it.wanted)
        elsewhere = self.now.abandon()
        stepped = [owned.name for owned in self.owned if owned.updated and owned.weight not in elsewhere]
        sent = [owned.name for owned in self.owned if owned.weight in elsewhere]
        folded = [owned.name for owned in self.owned if owned.factors.folded_tasks & failed]
        for owned in self.owned:
            for task in failed:
                owned.factors.drop_task(task)
        if stepped:
            self._broken = failed_after_updates(len(stepped), len(self.owned), stepped[0])
        elif sent:
            self._broken = failed_after_sending(len(sent), len(self.owned), sent[0])
        else:
            where = f" ({folded[0]} had already been accumulated)" if folded else ""
            self._broken = f"the last backward failed{where}; call zero_grad() to discard the window"

    def expect_usable(self) -> None:
        self.expect_no_failed_backward(closing=True)
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def expect_nothing_pending(self, what: str) -> None:
        """Raises if gradients wait for ``step()``, or some weights have been updated and others not."""
        pending = next((owned for owned in self.owned if owned.factors or owned.updated), None)
        if pending is not None:
            raise RuntimeError(f"{pending.name}: a backward is pending; call step() before you {what}")

    def has_window(self) -> bool:
        """A gradient waits, weights have been updated since the last ``step()``, or a backward or ``step()`` failed."""
        self.expect_no_failed_backward(closing=True)
        return self._broken is not None or any(owned.factors or owned.updated for owned in self.owned)

    def expect_asked_for(self) -> None:
        """Raises if a ``step()`` that finds no gradient at all follows forwards whose weights nothing trains."""
        for owned in self.owned:
            if any(use.current and not use.executed for use in owned.live_uses()):
                raise RuntimeError(
                    f"{owned.name}: step(), but no backward has asked for its gradient; backward(inputs=...) cannot "
                    "name an owned weight: call backward() without inputs"
                )

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, ``step()`` changes weights; an exception leaves some of them stepped and others not."""
        try:
            yield
        except BaseException as error:
            self._broken = (
                f"the last step() was interrupted by {type(error).__name__} while it changed weights; {WAY_OUT}"
            )
            self._half_stepped = True
            raise

    def refuse_scaled_updates(self) -> None:
        """GradScaler in immediate mode: raises; weights that were updated with scaled gradients stay an error."""
        if not self.owned:
            return
        self.expect_usable()
        updated = next((owned.name for owned in self.owned if owned.updated), None)
        error = scaled_updates(updated)
        if updated is not None:
            self._broken = error
        raise RuntimeError(error)

    def close_window(self) -> None:
        """After ``step()``."""
        for owned in self.owned:
            owned.last_window = owned.micro_batches or owned.last_window
        self._forget_window()

    def _forget_window(self) -> None:
        """One that is discarded was broken off, and says nothing of the length of the next."""
        for owned in self.owned:
            owned.clear()
        self._tasks.clear()

    def discard_window(self) -> None:
        """``zero_grad()``: drops what waits; refuses to hide an update that has already been made."""
        self.expect_no_failed_backward(closing=True)
        stepped = next((owned for owned in self.owned if owned.updated), None)
        if stepped is None and not self._half_stepped:
            self._broken = None
            self._forget_window()
        elif self._broken is None:
            raise RuntimeError(zeroed_after_updates(stepped.name))

    def roll_back(self, *, accept: bool) -> bool:
        """Drops everything that waits. Updates that have been made stay, and are an error unless accepted.

        Returns:
            False: weights have been updated since the last ``step()``, which is an error on the next use.
        """
        self.expect_no_failed_backward(closing=True)
        stepped = [owned.name for owned in self.owned if owned.updated]
        for owned in self.owned:
            owned.factors.clear()
        if accept or not (stepped or self._half_stepped):
            self.restored()
        elif self._broken is None:
            self._broken = rolled_back_after_updates(len(stepped), len(self.owned), stepped[0])
        return self._broken is None

    def restored(self) -> None:
        """After ``load_state_dict``: whatever a failed backward did is gone."""
        self._broken = None
        self._half_stepped = False
        self._forget_window()

    # ---- what a linear's forward and backward call

    def enter_wrapper(self, wrapper: DistributedDataParallel) -> None:
        self._client().enter_wrapper(wrapper)

    def wants(self, use: Use) -> bool:
        """Pre-flights the running graph task once; says whether it wants this use's weight gradient."""
        task = torch._C._current_graph_task_id()
        known = self._tasks.get(task)
        if known is None:
            with lock:
                if task not in self._tasks:
                    try:
                        _preflight(task, use)
                    except RuntimeError:
                        self.refuse_running()
                        raise
                known = self._tasks[task]
        return use.owned in known.wanted

    def deliver(self, use: Use, dy: Tensor, x: Tensor, borrowed: bool) -> None:
        owned, task = use.owned, use.task
        if use.recomputed:
            owned.count_replay()
        last = not owned.has_more_here(task)
        held = last and not owned.waits and not self.now.accepts(owned, dy)
        if owned.waits or held or not last:
            if owned.factors.outgrown_by(dy, x):
                self.later(owned, [(dy, x)], task)
            else:
                owned.factors.keep(dy, x, task, owned.micro_batches, borrowed_x=borrowed)
            if held:
                self.now.hold(owned)
        elif not owned.factors:
            self.now(owned, [(dy, x)])
        else:
            owned.factors.expect_unchanged(owned.name)
            self.now(owned, [*owned.factors.segments, (dy, x)])
            owned.factors.clear()

    def _sum_what_will_outgrow(self, wanted: Iterable[OwnedWeight]) -> None:
        """When a backward ends and more micro-batches may come: what a window would make larger than its sum."""
        last = self.micro_batches
        # The last of several is not kept if it is stepped as it comes.
        kept = last if last is None or last == 1 or self.waits else last - 1
        open_ = [owned for owned in wanted if owned.waits and (last is None or owned.micro_batches < last)]
        while open_:
            count_shared([(owned.factors, owned.micro_batches) for owned in open_])
            to_come = {it: max(0, (kept or it.expected_window()) - it.micro_batches) for it in open_}
            outgrown = [it for it, more in to_come.items() if it.factors.will_outgrow(it.micro_batches, more)]
            for owned in outgrown:
                self.later(owned)
            # What is kept no more is not shared with the others.
            open_ = [owned for owned in open_ if owned.factors.kept] if outgrown else []

    # ---- the pre-flight

    @staticmethod
    def refuse_running() -> None:
        """The running backward raises before any owned weight took part; what it added to ``.grad`` is an error."""
        for ledger, client in _in_use().items():
            name = client.added_here()
            if name is not None and ledger._broken is None:
                ledger._broken = refused_after_adding(name, any(owned.updated for owned in ledger.owned))

    def examine(self, first: Use) -> dict[OwnedWeight, Verdict]:
        """Reads the running graph task. Changes nothing.

        Args:
            first: the use that is running. The engine does not count a lone root among the nodes that it
                will execute; a root runs before every other node, so it is this use if it is one.

        Returns:
            For each owned weight whose gradient is wanted, what becomes of it.

        Raises:
            RuntimeError: an update in this graph task could not be exact.
        """
        verdicts: dict[OwnedWeight, Verdict] = {}
        left_out = []
        for owned in self.owned:
            if not owned.uses:
                # Most of them where each block is a graph task of its own (a reentrant checkpoint).
                continue
            alive = owned.live_uses()
            here = [use for use in alive if use is first or use.runs_here()]
            if not here or not owned.weight.requires_grad:
                continue
            if not owned.ticket_runs():
                left_out.append(owned)
                continue
            if self._broken is not None:
                raise RuntimeError(self._broken)
            owned.check_layout()
            if owned.updated:
                raise RuntimeError(
                    f"{owned.name}: a second backward before step(), but the weight has already been updated; "
                    "call step() after each backward, or attach with accumulation_steps"
                )
            new = False
            for use in here:
                use.expect_current()
                # Several graphs of forwards that were run before the first backward are one micro-batch.
                new |= use.opened >= owned.examined and not use.recomputed
            micro_batch = owned.micro_batches + new
            if self.micro_batches is not None and micro_batch > self.micro_batches:
                raise RuntimeError(
                    f"{owned.name}: backward number {micro_batch} since the last step(), with accumulation_steps="
                    f"{self.micro_batches}; call step() after each window, or attach with more accumulation_steps"
                )
            # A graph of a micro-batch that was counted before is not its first: it is not known to be the last.
            closing = self.micro_batches == 1 or (new and micro_batch == self.micro_batches)
            waits = (
                self.waits
                or not closing
                or (owned.waits and self.micro_batches == 1)
                or owned.weight.grad is not None
                or owned.has_unfinished(here, alive)
                # Of a graph whose backward comes later, as of the outer graph task of a reentrant checkpoint, the
                # engine cannot be asked.
                or owned.has_plain_consumer()
            )
            if not waits:
                owned.factors.expect_unchanged(owned.name)
            verdicts[owned] = Verdict(waits, micro_batch)
        asked = [owned for owned in left_out if owned.is_asked_for()]
        if asked or (left_out and self._client().accumulates_ordinary()):
            raise RuntimeError(
                f"{(asked or left_out)[0].name}: autograd.grad and backward(inputs=...) cannot ask for the gradient of "
                "an owned weight, which is never formed; use backward() with the others frozen or paused(), or detach()"
            )
        if verdicts:
            self._client().expect_ready()
        return verdicts

    def commit(self, task: int, verdicts: dict[OwnedWeight, Verdict], finished: Callable[[], None], first: Use) -> None:
        self._tasks[task] = GraphTask(frozenset(verdicts), weakref.ref(finished), first.recomputed)
        if verdicts:
            self.task_count += 1
        for owned, verdict in verdicts.items():
            owned.waits, owned.micro_batches = verdict.waits, verdict.micro_batch
            owned.examined = self.task_count
        # A block's graph task inside a backward has the states and hyperparameters that the first of them found.
        later = first.recomputed and any(owned.updated for owned in reversed(self.owned))
        if not later and not all(verdict.waits for verdict in verdicts.values()):
            self._client().before_updates()

    def begin(self) -> None:
        """A backward that completes gradients of some optimizer has been pre-flighted."""
        if not self.waits:
            self.now.begin({owned.weight for owned in self.owned if owned.waits})

    def _count_updates(self, wanted: Iterable[OwnedWeight]) -> None:
        """When a backward that ``wanted`` them has ended: raises the counts of what it updated, in one call for all.

        Every optimizer hears that it has ended, be it in the middle of another thread's backward, which counts its own.
        """
        uncounted = [owned for owned in wanted if owned.uncounted]
        raise_counts([owned.step for owned in uncounted])
        for owned in uncounted:
            owned.uncounted = False

    def finish(self, task: int) -> None:
        ended = self._tasks.get(task)
        if ended is not None:
            self._count_updates(ended.wanted)
            # An error leaves the task in the book, and is that backward's.
            self._sum_what_will_outgrow(ended.wanted)
            keep_apart([owned.factors for owned in ended.wanted], task)
        with lock:
            self._tasks.pop(task, None)
        if ended is not None and ended.wanted and not ended.nested and not self.waits:
            self.now.finish()


def _in_use() -> dict[Ledger, Client]:
    """In one order on every rank, for the ends of their backwards may meet there.

    A traceback or a cycle may keep the book of an optimizer that is gone, and its own end must not come in between.
    """
    books = sorted((ledger for ledger in _ledgers if ledger.owned), key=lambda ledger: ledger.number)
    return {ledger: client for ledger in books if (client := ledger._client()) is not None}


def _preflight(task: int, first: Use) -> None:
    """Asks every optimizer's book before any of them changes a weight."""
    ledgers = _in_use()
    findings = [ledger.examine(first) for ledger in ledgers]
    references = [weakref.ref(ledger) for ledger in ledgers]

    def finished() -> None:
        for reference in references:
            ledger = reference()
            if ledger is not None:
                ledger.finish(task)

    for ledger, verdicts in zip(ledgers, findings, strict=True):
        ledger.commit(task, verdicts, finished, first)
    # All of them: another rank's backward may reach the weights of an optimizer that this one's does not.
    for ledger in ledgers if any(findings) else ():
        ledger.begin()
    torch.autograd.Variable._execution_engine.queue_callback(finished)
