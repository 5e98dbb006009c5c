"""What is compared once: that the ranks train one model, and which wrapper reduces a part of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forge_megatron.coordinator.bucket import Buckets
from forge_megatron.coordinator.meeting import room
from forge_megatron.coordinator.ranks import Ranks
from forge_megatron.coordinator.window import Client


class Members:
    """The optimizers of a group's ranks.

    Attributes:
        reduced_elsewhere: the parameters whose gradients DistributedDataParallel reduces.

    Args:
        ranks: the members of the group.
        options: of the buckets.
        client: this rank's optimizer, weakly held.
        waits: everything is summed in ``step()``.
    """

    def __init__(self, ranks: Ranks, options: Buckets, client: Client, *, waits: bool):
        self.ranks = ranks
        self._options = options
        self._client = weakref.ref(client)
        self._waits = waits
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self.reduced_elsewhere: frozenset[Tensor] = frozenset()
        self._unsynced = False

    @property
    def options(self) -> Buckets:
        """With a size, which the parameters that there are when it is first asked for decide once and for all."""
        if self._options.nbytes is None:
            self._options = self._options.sized(self._client().names)
        return self._options

    def start(self, what: str, facts: dict[str, object], tensors: Sequence[Tensor]) -> None:
        """Compares the ranks' models and options, and gives every rank the first rank's values.

        Args:
            what: that every rank does at this point.
            facts: that must be equal, the parameters in their order among them.
            tensors: whose values the ranks get.

        Raises:
            ValueError: a fact differs, on every rank; nothing has changed then.
            NotImplementedError: parameters on several devices.
        """
        names = self._client().names
        devices = {p.device for p in names}
        if len(devices) > 1:
            raise NotImplementedError(f"process_group= with parameters on {devices}: move the model to one device")
        self.ranks.agree(what, {**facts, "buckets": self.options})
        self.ranks.room = room(names)
        self.ranks.broadcast(tensors)

    def enter_wrapper(self, wrapper: DistributedDataParallel) -> frozenset[Tensor]:
        """A forward inside DistributedDataParallel, which reduces the ``.grad`` of what it was not told to ignore.

        Returns:
            What it reduces.

        Raises:
            NotImplementedError: it would reduce owned weights, which have no ``.grad``; or inside its ``join()``.
            ValueError: it has another number of ranks.
            RuntimeError: inside ``no_sync()``, where updates do not wait.
        """
        if torch.is_grad_enabled():
            if wrapper._join_config.enable:
                raise NotImplementedError(
                    "DistributedDataParallel.join(): on a rank whose data has ended it runs the wrapper's collectives "
                    "and not the sums of owned weights; without join(), give a rank whose data has ended an empty batch"
                )
            self._unsynced = not wrapper.require_backward_grad_sync
            if self._unsynced and not self._waits:
                raise RuntimeError(
                    "no_sync() where backward steps the weights: the one micro-batch of a step is summed over the "
                    "ranks; run it outside no_sync(), or attach with accumulation_steps="
                )
        if self._wrapper is not None and self._wrapper() is wrapper:
            return self.reduced_elsewhere
        client = self._client()
        theirs = frozenset(p for p in wrapper._module_parameters if p in client.names)
        both = next((p for p in theirs if p in client.owned), None)
        if both is not None:
            raise NotImplementedError(
                f"{client.names[both]}: DistributedDataParallel would reduce it a second time; attach the very module "
                "that it wraps, before it is built"
            )
        if wrapper.process_group.size() != len(self.ranks.members):
            raise ValueError(
                f"DistributedDataParallel has {wrapper.process_group.size()} ranks and process_group= "
                f"{len(self.ranks.members)}; give both the same group"
            )
        self._wrapper, self.reduced_elsewhere = weakref.ref(wrapper), theirs
        return theirs

    def expect_reduced(self) -> None:
        """Raises at ``step()`` if the window's last micro-batch left ``.grad`` a rank's own.

        Raises:
            RuntimeError: names a parameter.
        """
        left = next((p for p in self.reduced_elsewhere if p.grad is not None), None) if self._unsynced else None
        if left is not None:
            raise RuntimeError(
                f"{self._client().names[left]}: step(), but the last backward was inside no_sync(), so that "
                "DistributedDataParallel has not summed its .grad over the ranks; run the last micro-batch outside it"
            )
