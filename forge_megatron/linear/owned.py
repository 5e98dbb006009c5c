"""A weight that FORGE steps, and one use of it by a linear layer.

An owned weight enters its linear's autograd function detached; a 0-dim leaf, its *ticket*, stands in
for it in the graph. Whether the ticket's ``AccumulateGrad`` node will run tells whether a backward
wants this weight's gradient at all (``torch.autograd.grad(loss, x)`` does not).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from forge_megatron.linear.factors import Factors

if TYPE_CHECKING:
    from forge_megatron.kernels import Slot
    from forge_megatron.linear.ledger import Ledger

# Weak on both sides: an optimizer that dies takes its owned weights with it, and the model stays usable.
_owners: dict[int, weakref.ref[OwnedWeight]] = {}


def owner_of(weight: Tensor) -> OwnedWeight | None:
    """The record of an owned weight, or None where an ordinary optimizer steps it."""
    reference = _owners.get(id(weight))
    owned = reference() if reference is not None else None
    return owned if owned is not None and owned.weight is weight else None


def in_backward() -> bool:
    """True inside a running backward: there, a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def open_use(weight: Tensor, training: bool = True) -> Use | None:
    """Registers one call of a linear with ``weight``; every forward calls it, also under ``no_grad``.

    Args:
        weight: the parameter that the linear multiplies with.
        training: the module's ``training`` flag.

    Returns:
        The use, or None if the weight is not owned. ``use.ticket`` is None where no gradient of the
        weight is wanted (frozen, paused, ``no_grad``): the layer then computes the input gradient only.
    """
    owned = owner_of(weight)
    return None if owned is None else owned.open(training)


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
        bypassed: something reads it without calling its module, so it was stepped from ``.grad``.
    """

    def __init__(self, weight: Tensor, name: str, ledger: Ledger):
        if owner_of(weight) is not None:
            raise ValueError(f"{name}: another ForgeOptimizer already steps this weight; call its detach() first")
        self.weight = weight
        self.name = name
        self.ticket = torch.zeros((), device=weight.device, requires_grad=True)
        self.factors = Factors(weight)
        self.slot: Slot | None = None
        self.step: Tensor | None = None
        self._ledger = weakref.ref(ledger)
        self._ticket_node = get_gradient_edge(self.ticket).node
        self._weight_node = None
        self._uses: list[weakref.ref[Use]] = []
        self._layout = (weight.dtype, weight.device, weight.shape)
        self.bypassed = False
        self.clear()
        key = id(weight)
        _owners[key] = weakref.ref(self, lambda _: _owners.pop(key, None))

    def clear(self) -> None:
        """Forgets the window: kept factors, uses, and what was decided."""
        self.factors.clear()
        self._uses.clear()
        self.shadows = self.replayed = 0
        self.waits = self.updated = False

    @property
    def ledger(self) -> Ledger | None:
        return self._ledger()

    def open(self, training: bool) -> Use:
        ledger = self.ledger
        if ledger is None or ledger.paused or not self.weight.requires_grad:
            return Use(self, None)
        recomputed = in_backward()
        if not recomputed:
            ledger.expect_no_failed_backward()
        if not torch.is_grad_enabled():
            # A reentrant checkpoint's forward looks like this; only the recomputation has a graph.
            if training and not recomputed and not torch.is_inference_mode_enabled():
                self.shadows += 1
            return Use(self, None)
        if self.updated and recomputed:
            raise RuntimeError(
                f"{self.name}: recomputed after it had been updated in this backward, because a "
                "reentrant checkpoint ran in eval mode; call model.train(), or use "
                "checkpoint(..., use_reentrant=False)"
            )
        use = Use(self, self.ticket, recomputed, ledger.task_count)
        self._uses.append(weakref.ref(use))
        return use

    def live_uses(self) -> list[Use]:
        """The uses since the last step whose graphs are alive."""
        alive = [use for use in (reference() for reference in self._uses) if use is not None]
        if len(alive) < len(self._uses):
            self._uses = [weakref.ref(use) for use in alive]
        return alive

    def ticket_runs(self) -> bool:
        return torch._C._will_engine_execute_node(self._ticket_node)

    def plain_consumer_runs(self) -> bool:
        """Inside a backward: something reads the weight without calling the module."""
        if self._weight_node is None or self._weight_node.variable is not self.weight:
            self._weight_node = get_gradient_edge(self.weight).node
        return torch._C._will_engine_execute_node(self._weight_node)

    def has_unfinished(self, here: list[Use], alive: list[Use]) -> bool:
        """Some use of this window lies outside the running graph task's uses ``here``."""
        if any(not (use.executed or use.recomputed or use in here) for use in alive):
            return True
        return self.shadows > self.replayed + sum(use.recomputed for use in here)

    def check_layout(self) -> None:
        now = (self.weight.dtype, self.weight.device, self.weight.shape)
        if now != self._layout:
            raise RuntimeError(
                f"{self.name}: was {self._layout} at attach and is {now}; move and cast the model first, then attach"
            )
        if self.weight._backward_hooks or getattr(self.weight, "_post_accumulate_grad_hooks", None):
            raise RuntimeError(
                f"{self.name}: a gradient hook is registered on an owned weight, whose gradient is never "
                "formed; remove the hook, or register it before attach (the weight is then not fused)"
            )

    def mark_updated(self) -> None:
        """After its kernel was launched: a stale use must fail its version check."""
        torch.autograd.graph.increment_version(self.weight)
        self.updated = True


class Use:
    """One call of a linear with an owned weight; it lives as long as the graph it belongs to."""

    __slots__ = ("__weakref__", "_node", "executed", "opened", "owned", "recomputed", "ticket", "version")

    def __init__(self, owned: OwnedWeight, ticket: Tensor | None, recomputed: bool = False, opened: int = 0):
        self.owned = owned
        self.ticket = ticket
        self.recomputed = recomputed
        self.opened = opened
        self.executed = False
        self.version = owned.weight._version
        self._node = None

    @property
    def weight(self) -> Tensor:
        """The weight outside the graph, never an unpacked copy."""
        return self.owned.weight.detach()

    def bind(self, node) -> None:
        """Remembers the autograd node of this call (``y.grad_fn``; None under ``no_grad``)."""
        if node is not None:
            self._node = weakref.ref(node)

    def runs_here(self) -> bool:
        """Inside a backward: the engine will execute this use in the running graph task."""
        node = self._node() if self._node is not None else None
        return node is not None and torch._C._will_engine_execute_node(node)

    def expect_current(self) -> None:
        weight = self.owned.weight
        if weight._version != self.version:
            raise RuntimeError(
                f"{self.owned.name}: changed between its forward (version {self.version}) and this "
                f"backward (version {weight._version}), so the input gradient would be wrong; run the "
                "forward again after a step, and call step() once after each backward"
            )

    def begin(self) -> bool:
        """First thing in a linear's backward, before anything has changed.

        Returns:
            Whether the weight gradient's factors are to be handed over with :meth:`deliver`.

        Raises:
            RuntimeError: a second backward without ``step()``, a stale weight, ``create_graph=True``.
        """
        if self.ticket is None:
            self.expect_current()
            return False
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.owned.name}: create_graph=True through a weight that is updated in backward; "
                "optimizer.detach() gives ordinary modules for a gradient penalty"
            )
        ledger = self.owned.ledger
        if ledger is None:
            raise RuntimeError(
                f"{self.owned.name}: its optimizer was deleted between forward and backward; run forward again"
            )
        wanted = ledger.wants(self)
        self.expect_current()
        return wanted

    def deliver(self, dy: Tensor, x: Tensor, borrowed: bool = False) -> None:
        """Hands over the factors of the weight gradient ``dYᵀ X`` (DESIGN: the granule's operands).

        Launches the update if this was the weight's last use and nothing makes it wait; otherwise keeps
        the factors. Call it between issuing the input gradient's collective and waiting for it.

        Args:
            dy: ``[T, O]``, every token of the weight's gradient on this rank.
            x: ``[T, I]``.
            borrowed: ``x`` lies in a buffer that will be reused; a kept factor is then copied.
        """
        self.executed = True
        self.owned.ledger.deliver(self, dy, x, borrowed)
