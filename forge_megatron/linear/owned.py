"""A weight that FORGE steps, and one use of it by a linear layer.

An owned weight enters its linear's autograd function detached; a 0-dim leaf, its *ticket*, stands in
for it in the graph. Whether the ticket's ``AccumulateGrad`` node will run tells whether a backward
wants this weight's gradient at all (``torch.autograd.grad(loss, x)`` does not).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from forge_megatron.linear.factors import Factors
from forge_megatron.linear.hooks import has_gradient_hook, watch_registrations
from forge_megatron.linear.untraced import untraced

if TYPE_CHECKING:
    from forge_megatron.kernels import Slot
    from forge_megatron.linear.ledger import Ledger

_will_execute = torch._C._will_engine_execute_node

# Weak on both sides: an optimizer that dies takes its owned weights with it, and the model stays usable.
_owners: dict[int, weakref.ref[OwnedWeight]] = {}
# Backward runs in one thread a device, and another thread may run a forward meanwhile.
lock = threading.RLock()


def owner_of(weight: Tensor) -> OwnedWeight | None:
    """The record of an owned weight, or None where an ordinary optimizer steps it."""
    reference = _owners.get(id(weight))
    owned = reference() if reference is not None else None
    return owned if owned is not None and owned.weight is weight else None


def in_backward() -> bool:
    """True inside a running backward: there, a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _in_compiled_backward() -> bool:
    """True where compiled autograd runs the graph that it made of a backward."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region


def in_function_forward() -> bool:
    """True inside the forward of an autograd function, such as a reentrant checkpoint's.

    It switches forward-mode gradients off too, which ``no_grad`` does not.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def open_use(weight: Tensor) -> Use | None:
    """Registers one call of a linear with ``weight``; every forward calls it, also under ``no_grad``.

    Args:
        weight: the parameter that the linear multiplies with.

    Returns:
        The use, or None if the weight is not owned. ``use.ticket`` is None where no gradient of the
        weight is wanted (frozen, paused, ``no_grad``): the layer then computes the input gradient only.
    """
    owned = owner_of(weight)
    return None if owned is None else owned.open()


def accumulates(leaf: Tensor) -> bool:
    """Inside a backward: the engine will add to ``leaf.grad``."""
    return _leaf_is_input(leaf, captured=False)


def _leaf_is_input(leaf: Tensor, *, captured: bool) -> bool:
    """Whether the running backward computes the gradient of ``leaf``; ``captured`` if autograd.grad returns it."""
    try:
        return _will_execute(get_gradient_edge(leaf).node)
    except RuntimeError:
        # The engine's answer for a leaf that autograd.grad was given.
        return captured


def _asking(reference: weakref.ref[OwnedWeight], *, sums: bool = False) -> Callable[[], None]:
    """Asks the owner of a weight for as long as it is; ``sums``: of a hook that sees the window's sum."""

    def ask() -> None:
        owned = reference()
        if owned is not None and owner_of(owned.weight) is owned:
            owned.expect_none_open()
            if sums:
                owned.expect_nothing_kept()

    return ask


class OwnedWeight:
    """What FORGE knows of one weight between two steps.

    Attributes:
        weight: the parameter, ``[O, I]``.
        name: its name in the model, for errors and checkpoints.
        slot: what its update reads and writes, and ``step``, its count of updates, 0-dim fp32 on the CPU
            (both set by the optimizer).
        factors: the kept ``(dY, X)`` pairs and the accumulator of a weight that waits for ``step()``.
        waits: it waits for ``step()`` in this window.
        updated: it has been stepped in this window.
        uncounted: it has, and ``step`` does not say so yet; the end of the backward makes it.
        micro_batches: of this window, that its gradient is the sum of so far.
        last_window: of the last window that had any and was stepped; before the first, how many are expected of it.
        scheduled: tells how many this window will have, where a trainer has a schedule of them; None: as the last.
        examined: number of graph tasks that had reached its optimizer when one last asked for its gradient.
        uses: its calls whose graphs are alive.
        bypassed: something reads it without calling its module, so it was stepped from ``.grad``.
    """

    def __init__(self, weight: Tensor, name: str, ledger: Ledger):
        if owner_of(weight) is not None:
            raise ValueError(f"{name}: another ForgeOptimizer already steps this weight; call its detach() first")
        self.weight = weight
        self.name = name
        self.factors = Factors(weight, ledger.later.dtype)
        self.slot: Slot | None = None
        self.step: Tensor | None = None
        self._ledger = weakref.ref(ledger)
        self.renew_ticket()
        # Not a WeakSet, whose every iteration costs more than the rest of a pre-flight.
        self.uses: set[weakref.ref[Use]] = set()
        self._shadows = self._replayed = 0
        self._shadow_version = weight._version
        self._layout = (weight.dtype, weight.device, weight.shape)
        self.bypassed = False
        self.examined = self.micro_batches = self.last_window = 0
        self.scheduled: Callable[[], int] | None = None
        self.clear()
        key = id(weight)
        _owners[key] = weakref.ref(self, lambda _: _owners.pop(key, None))
        watch_registrations(weight, _asking(weakref.ref(self)), _asking(weakref.ref(self), sums=True))

    def renew_ticket(self) -> None:
        """Makes the ticket's node anew: autograd runs a leaf's on the stream that made it."""
        self.ticket = torch.zeros((), dtype=torch.float32, device=self.weight.device, requires_grad=True)
        self._ticket_node = get_gradient_edge(self.ticket).node

    def clear(self) -> None:
        """Forgets the window: kept factors, and what was decided. Uses live as long as their graphs."""
        self.factors.clear()
        self.waits = self.updated = self.uncounted = False
        self.micro_batches = 0
        self.updated_version: int | None = None

    def expected_window(self) -> int:
        """How many micro-batches this window is expected to have."""
        return self.last_window if self.scheduled is None else self.scheduled()

    def release(self) -> None:
        """The weight belongs to nobody again; a backward through a graph from before is refused."""
        self.clear()
        self._ledger = lambda: None
        if owner_of(self.weight) is self:
            del _owners[id(self.weight)]

    @property
    def ledger(self) -> Ledger | None:
        return self._ledger()

    def open(self) -> Use:
        ledger = self._ledger()
        if ledger is None or not self.weight.requires_grad:
            return Use(self, None)
        recomputed = in_backward()
        if not recomputed:
            ledger.expect_no_failed_backward()
        if not torch.is_grad_enabled():
            if not recomputed and in_function_forward():
                self._count_shadow()
            return Use(self, None)
        use = Use(self, self.ticket, recomputed, ledger.task_count)
        self.uses.add(weakref.ref(use, self.uses.discard))
        return use

    def _count_shadow(self) -> None:
        """A forward whose graph comes later, from its recomputation inside backward."""
        if self._shadow_version != self.weight._version:
            # Recomputing those on the new weight would be an error, not a use.
            self._shadows = self._replayed = 0
            self._shadow_version = self.weight._version
        self._shadows += 1

    def count_replay(self) -> None:
        """A recomputed use was delivered."""
        self._replayed += 1

    def live_uses(self) -> list[Use]:
        """The uses whose graphs are alive."""
        return [use for reference in tuple(self.uses) if (use := reference()) is not None]

    def has_more_here(self, task: int) -> bool:
        """Inside the graph task ``task``, at a use: the engine will execute another that it has not reached."""
        return len(self.uses) > 1 and any(use.task != task and use.runs_here() for use in self.live_uses())

    def ticket_runs(self) -> bool:
        return _will_execute(self._ticket_node)

    def has_plain_consumer(self) -> bool:
        """A graph that is alive reads the weight without calling the module, be it the running one or another.

        Its nodes keep the weight's alive, which holds the weight; a mark that is left on it is gone otherwise.
        """
        if self.weight._use_count() == 1:
            return False
        get_gradient_edge(self.weight).node.metadata["forge_megatron"] = True
        return "forge_megatron" in get_gradient_edge(self.weight).node.metadata

    def is_asked_for(self) -> bool:
        """Inside a backward with chosen inputs: the weight, which a plain consumer put in the graph, is one."""
        return _leaf_is_input(self.weight, captured=True)

    def has_unfinished(self, here: list[Use], alive: list[Use]) -> bool:
        """Some use of the weight as it is now lies outside the running graph task's uses ``here``."""
        if len(alive) > len(here) and any(
            not (use.executed or use.recomputed or use in here) and use.current for use in alive
        ):
            return True
        if not self._shadows or self._shadow_version != self.weight._version:
            return False
        return self._shadows > self._replayed + sum(use.recomputed for use in here)

    def expect_as_updated(self) -> None:
        """Raises at ``step()`` if something came after the weight's update that torch would have put before it."""
        if self.updated and self.weight.grad is not None:
            raise RuntimeError(
                f"{self.name}: updated in one backward and read without its module in another before "
                "step(); run both in one backward, or attach with waiting=True"
            )
        if self.updated and self.weight._version != self.updated_version:
            raise RuntimeError(
                f"{self.name}: was written after backward had updated it and before step(); write weights after "
                "step(), or attach with waiting=True"
            )

    def check_layout(self) -> None:
        now = (self.weight.dtype, self.weight.device, self.weight.shape)
        if now != self._layout:
            raise RuntimeError(
                f"{self.name}: was {self._layout} at attach and is {now}; move and cast the model first, then attach"
            )
        if has_gradient_hook(self.weight):
            raise RuntimeError(self._hooked_too_late())

    def expect_none_open(self) -> None:
        """Raises before a gradient hook is registered while a forward's backward is still to come."""
        if any(use.current and not use.executed for use in self.live_uses()):
            raise RuntimeError(self._hooked_too_late())

    def expect_nothing_kept(self) -> None:
        """Raises before a hook that reads ``.grad`` is registered, where a part of the window's sum is elsewhere."""
        if self.factors:
            raise RuntimeError(
                f"{self.name}: a post-accumulate hook inside a window, whose .grad would lack the micro-batches before "
                "it; register it before the window's first backward"
            )

    def _hooked_too_late(self) -> str:
        return (
            f"{self.name}: a gradient hook between forward and backward, which keeps no gradient that it could see; "
            "register it before the forward, which then forms this weight's gradient, or drop that forward's outputs"
        )

    def mark_updated(self) -> None:
        """After its kernel was launched: a stale use must fail its version check."""
        torch.autograd.graph.increment_version(self.weight)
        self.updated = True
        self.updated_version = self.weight._version


class Use:
    """One call of a linear with an owned weight; it lives as long as the graph it belongs to.

    Attributes:
        ticket: input of the linear's autograd function; None: no weight gradient is wanted.
        recomputed: opened inside a backward.
        opened: number of graph tasks that had reached its optimizer when it was opened.
        task: the last graph task that executed it; None: none has.
        version: the weight's version that it multiplied with.
    """

    __slots__ = ("__weakref__", "_node", "opened", "owned", "recomputed", "task", "ticket", "version")

    def __init__(self, owned: OwnedWeight, ticket: Tensor | None, recomputed: bool = False, opened: int = 0):
        self.owned = owned
        self.ticket = ticket
        self.recomputed = recomputed
        self.opened = opened
        self.task: int | None = None
        self.version = owned.weight._version
        self._node = None

    @property
    def weight(self) -> Tensor:
        """The weight outside the graph, never an unpacked copy."""
        return self.owned.weight.detach()

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        """:attr:`weight` in ``dtype``; itself inside an autograd function, where nothing is recorded."""
        weight = self.weight if torch.is_grad_enabled() else self.owned.weight
        return weight if weight.dtype is dtype else weight.to(dtype)

    @property
    def executed(self) -> bool:
        return self.task is not None

    @property
    def current(self) -> bool:
        """The weight is the one that this use multiplied with."""
        return self.owned.weight._version == self.version

    def bind(self, node) -> None:
        """Remembers the autograd node of this call (``y.grad_fn``; None under ``no_grad``)."""
        if node is not None:
            self._node = weakref.ref(node)

    def runs_here(self) -> bool:
        """Inside a backward: the engine will execute this use in the running graph task."""
        node = self._node() if self._node is not None else None
        return node is not None and _will_execute(node)

    def expect_current(self) -> None:
        if self.owned.weight._version != self.version:
            raise RuntimeError(
                f"{self.owned.name}: changed between its forward (version {self.version}) and this "
                f"backward (version {self.owned.weight._version}), so the input gradient would be wrong; run the "
                "forward again after a step, and call step() once after each backward"
            )

    @untraced
    def begin(self) -> bool:
        """First thing in a linear's backward, before anything has changed.

        Returns:
            Whether the weight gradient's factors are to be handed over with :meth:`deliver`.

        Raises:
            RuntimeError: a second backward without ``step()``, a stale weight, ``create_graph=True``.
        """
        if _in_compiled_backward():
            raise NotImplementedError(
                f"{self.owned.name}: compiled autograd traces backward, and the engine then cannot tell a weight's "
                "last use; turn torch._dynamo.config.compiled_autograd off (torch.compile of the model is fine)"
            )
        if self.ticket is None:
            self.expect_current()
            return False
        ledger = self.owned._ledger()
        if torch.is_grad_enabled():
            if ledger is not None:
                ledger.refuse_running()
            raise RuntimeError(
                f"{self.owned.name}: create_graph=True through a weight that is updated in backward; "
                "optimizer.detach() gives ordinary modules for a gradient penalty"
            )
        if ledger is None:
            raise RuntimeError(
                f"{self.owned.name}: its optimizer was detached or deleted between forward and backward; run "
                "forward again"
            )
        wanted = ledger.wants(self)
        self.expect_current()
        return wanted

    @untraced
    def deliver(self, dy: Tensor, x: Tensor, borrowed: bool = False) -> None:
        """Hands over the factors of the weight gradient ``dYᵀ X`` (DESIGN: the granule's operands).

        Launches the update if this was the weight's last use and nothing makes it wait; otherwise keeps
        the factors. Call it between issuing the input gradient's collective and waiting for it.

        Args:
            dy: ``[T, O]``, every token of the weight's gradient on this rank.
            x: ``[T, I]``.
            borrowed: ``x`` lies in a buffer that will be reused; a kept factor is then copied.
        """
        self.task = torch._C._current_graph_task_id()
        self.owned._ledger().deliver(self, dy, x, borrowed)
