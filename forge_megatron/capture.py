"""A whole training step as one CUDA graph: what the device does is replayed, what the host does is done anew.

A step whose updates are made inside backward launches the same kernels each time. What changes from step to
step lies in device memory: the hyperparameters and bias corrections of each weight, and the keys of its random
bits. The host writes them before each replay, and counts the step after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from forge_megatron import kernels
from forge_megatron.coordinator import Stage, Together
from forge_megatron.discarding import Discarding
from forge_megatron.linear.counts import raise_counts


class CudaGraphs:
    """Graphs of one device that share their memory, and the stream on which they are captured."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        kernels.leave_out(self.stream)
        self._memory = kernels.GraphMemory()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, kernels are launched on the capture's stream, after and before the current one's."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def record(
        self, function: Callable[[], object], table_bytes: int, generators: Iterable[torch.Generator]
    ) -> tuple[object, Callable[[], None]]:
        """What ``function`` returned, whose tensors each replay writes anew, and the replay.

        Args:
            table_bytes: of the tables that its kernels read.
            generators: that it draws from besides the device's own.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            kernels.reserved(table_bytes, self.stream.device) as tables,
            self._memory.recorded(graph, self.stream, generators),
        ):
            made = function()

        def replay(_tables=tables) -> None:
            graph.replay()

        return made, replay


@dataclass(frozen=True)
class Recording:
    """One captured step.

    Attributes:
        inputs: the tensors that it reads; a replay copies the caller's there.
        made: what the function returned.
        replay: launches it.
        stepped: the parameters that it steps.
        norm, measured: what ``grad_norm`` and ``gradient_norms`` are made of, written by each replay.
    """

    inputs: list[Tensor]
    made: object
    replay: Callable[[], None]
    stepped: list[Tensor]
    norm: Tensor
    measured: tuple[Tensor, Tensor | None]


class Capturing(Discarding):
    """An optimizer whose step can be captured."""

    _graphs: CudaGraphs | None = None

    def capture(
        self, step_function: Callable, *, warmup: int = 3, generators: Iterable[torch.Generator] = ()
    ) -> Captured:
        """Makes a function that runs ``step_function`` as one CUDA graph.

        The function trains one step: forward, backward, one ``optimizer.step()``, ``optimizer.zero_grad()``. The first
        calls for each shape of the inputs run it as it is, one more captures it, and all after that replay:

        >>> train_step = optimizer.capture(step_function)
        >>> for batch in batches:
        ...     loss = train_step(batch)
        ...     scheduler.step()

        Learning rates and other hyperparameters, bias corrections and the bits of stochastic rounding are those of each
        step, as are dropout masks. A step that refreshes a projection (GaLore, APOLLO) runs as it is, and the next one
        is replayed again. Anything else that the function does on the host (printing, a scheduler, choosing a path by a
        value) is done while it is captured and not again.

        Over data-parallel ranks (``process_group=``) the sums of gradients are in the graph too. Each rank calls the
        function as often as the others; where one has to run a call as it is, or to capture it, all do. One small
        collective over the hosts comes before every call, and no other with a replay.

        Args:
            step_function: of tensors on the parameters' device, at any depth of tuples, lists and dicts, and of
                constants, for each of which a new recording is made; returns tensors or None.
            warmup: calls that run as they are.
            generators: of random numbers, besides the device's own, that it draws from; their states move on with each
                replay.

        Returns:
            A function with the same arguments. What it returns are copies, outside the graph of autograd.

        Raises:
            ValueError: parameters that are not all on one CUDA device.
            NotImplementedError: hooks on ``step()``, or weights that ``fully_shard`` has sharded.
        """
        if self._graphs is None:
            self._graphs = graphs_for({label: p.device for p, label in self.names.items()})
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            raise NotImplementedError("capture() with hooks on step(), which a replay would not call; remove them")
        if self._shards.group_of:
            raise NotImplementedError("capture() of weights that fully_shard has sharded is not built; run it eagerly")
        if warmup < 1:
            raise ValueError(f"warmup={warmup!r}; kernels are compiled in a call that is not captured, give at least 1")
        self._ledger.expect_nothing_pending("capture a step")
        with self._graphs.beside():
            for owned in self.owned.values():
                owned.renew_ticket()
        return Captured(self, step_function, warmup, tuple(generators))

    @contextmanager
    def _one_step(self) -> Iterator[None]:
        """Inside, a function that is (to be) captured runs; raises if it did more than one step."""
        calls, hyperparameters = self._calls, self._parameters.hyperparameters()
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
        if self._calls != calls + 1:
            raise RuntimeError(f"the captured function called step() {self._calls - calls} times; call it once in it")
        self._ledger.expect_nothing_pending("end a captured step")
        if self._parameters.hyperparameters() != hyperparameters:
            raise RuntimeError(
                "a hyperparameter (lr, weight_decay ...) changed inside the captured function, whose replays would not "
                "change it; call the scheduler after the function"
            )

    def _before_replay(self) -> None:
        """Writes what a step reads of the host: states of what was unfrozen, this step's scalars and random keys."""
        self._ledger.expect_usable()
        self._ledger.expect_nothing_pending("run a captured step")
        self._skips.settle()
        self.before_updates()

    @torch.no_grad()
    def _after_replay(self, recording: Recording, *, counted: bool) -> None:
        """What the host does at the end of a step.

        Args:
            counted: it ran the function itself just now, and has counted.
        """
        counts = [self.state[p]["step"] for p in recording.stepped]
        if not counted:
            raise_counts(counts)
            torch.autograd.graph.increment_version(recording.stepped)
            self._parameters.advance_running()
        norms_sq, scale = recording.measured
        self._measured = norms_sq.clone(), None if scale is None else scale.clone()
        self._grad_norm = recording.norm.clone()
        names = list(self.names.values())
        self._skips.observe(
            self._measured[0],
            self._grad_norm,
            names,
            whole=self._plan.atomic,
            counts=counts,
            running=self._parameters.advanced,
        )
        self._parameters.close_window()
        self._skips.settle()


class Captured:
    """A step function that is replayed; see :meth:`Capturing.capture`."""

    def __init__(
        self, optimizer: Capturing, step_function: Callable, warmup: int, generators: tuple[torch.Generator, ...]
    ):
        self._optimizer = optimizer
        self._function = step_function
        self._warmup = warmup
        self._generators = generators
        self._together = Together(optimizer._sums)
        self._calls: dict[tuple, int] = {}
        self._recordings: dict[tuple, Recording] = {}
        # The parameters that calls of each kind step, as far as one has.
        self._stepped: dict[tuple, Iterable[Tensor]] = {}

    def __call__(self, *args, **kwargs):
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(leaves, structure)
        stage = self._together.stage(self._stage(key))
        if stage is Stage.REPLAY:
            return self._replay(self._recordings[key], inputs)
        self._calls[key] = self._calls.get(key, 0) + 1
        if stage is Stage.RECORD:
            self._together.expect_no_wrapper()
            self._recordings[key] = self._record(leaves, structure)
            return self._replay(self._recordings[key], inputs, recorded=True)
        optimizer = self._optimizer
        before = self._counts()
        with optimizer._graphs.beside(), optimizer._one_step():
            made = _outside_autograd(self._function(*args, **kwargs))
        self._stepped[key] = self._raised(before) or self._steps_of(key)
        return _copies(made)

    def beside(self) -> AbstractContextManager[None]:
        """Inside, kernels are launched where the step is captured: for nodes of autograd that outlive a step."""
        return self._optimizer._graphs.beside()

    def _stage(self, key: tuple) -> Stage:
        """What this call would do on a rank that is alone."""
        if self._refreshes(key):
            return Stage.RUN
        if key in self._recordings:
            return Stage.REPLAY
        return Stage.RECORD if self._calls.get(key, 0) >= self._warmup else Stage.RUN

    def _refreshes(self, key: tuple) -> bool:
        """Whether a step of this kind now refreshes a projection, which needs decompositions that no graph can have."""
        optimizer = self._optimizer
        # A step that was not taken is not counted.
        optimizer._skips.settle_counts()
        return optimizer._parameters.refresh_projections(self._steps_of(key))

    def _steps_of(self, key: tuple) -> Iterable[Tensor]:
        return self._stepped.get(key, self._optimizer.names)

    def _counts(self) -> list[tuple[Tensor, Tensor]]:
        return [(counter, counter.clone()) for counter in self._optimizer._parameters.counters()]

    def _raised(self, before: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The parameters that were stepped since their counts were as ``before``."""
        counted = {counter for counter, value in before if not torch.equal(counter, value)}
        return [p for p, state in self._optimizer.state.items() if state["step"] in counted]

    def _key(self, leaves: list, structure) -> tuple:
        """What a recording is made for: shapes, constants, and what is trained."""
        parameters = self._optimizer.names
        device = next(iter(parameters)).device
        described = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if leaf.device != device:
                    raise ValueError(
                        f"input {index} is on {leaf.device}, the parameters are on {device}; a graph can't copy it "
                        "there: move it first"
                    )
                leaf = (leaf.shape, leaf.dtype, leaf.requires_grad)
            described.append(leaf)
        trained = tuple(p.requires_grad for p in parameters)
        rules = tuple(rule for _, rule in self._optimizer._parameters.rules_by_label())
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        key = (str(structure), *described, trained, rules, autocast)
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"an input of the captured function is no tensor and no constant: {error}") from None
        return key

    def _record(self, leaves: list, structure) -> Recording:
        optimizer = self._optimizer
        held = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if _is(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(held, structure)
        optimizer._before_replay()
        optimizer._skips.settle(wait=True)
        before = self._counts()
        optimizer._skips.held = True
        failure = None
        try:
            with optimizer._one_step():
                made, replay = optimizer._graphs.record(
                    lambda: _outside_autograd(self._function(*args, **kwargs)),
                    kernels.table_bytes(optimizer.names) + self._together.table_bytes(),
                    self._generators,
                )
        except Exception as error:
            failure = error
        finally:
            optimizer._skips.held = False
        if self._together.failed(failure):
            # Nothing has run on the device.
            optimizer._leave_window(accept=True)
            for counter, value in before:
                counter.copy_(value)
            raise RuntimeError(
                f"the step could not be captured as a CUDA graph: {failure or 'another rank failed to'}. Something in "
                "it waits for the device or reads its values on the host (.item(), printing a tensor, a boolean mask, "
                "a copy from the CPU), or a loss of an earlier step still holds its graph: delete it. Weights, states "
                "and counts are as before"
            ) from failure
        stepped = self._raised(before)
        inputs = [leaf for leaf in held if _is(leaf)]
        return Recording(inputs, made, replay, stepped, optimizer._grad_norm, optimizer._measured)

    def _replay(self, recording: Recording, inputs: list[Tensor], *, recorded: bool = False):
        optimizer = self._optimizer
        if not recorded:
            optimizer._before_replay()
            with torch.no_grad():
                for held, given in zip(recording.inputs, inputs, strict=True):
                    held.copy_(given)
        recording.replay()
        optimizer._after_replay(recording, counted=recorded)
        return _copies(recording.made)


def graphs_for(devices: dict[str, torch.device]) -> CudaGraphs:
    """The graphs of the device that all parameters, by name, are on.

    Raises:
        ValueError: there is none, or it is no CUDA device.
    """
    first = next(iter(devices.values()))
    for label, device in devices.items():
        if device.type != "cuda" or device != first:
            raise ValueError(f"{label} is on {device}; capture() needs every parameter on one CUDA device")
    return CudaGraphs(first)


def _is(leaf) -> bool:
    return isinstance(leaf, Tensor)


def _outside_autograd(made):
    for leaf in tree_flatten(made)[0]:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"the captured function returned {leaf!r}, which replays would not change; return tensors")
    return tree_map(lambda leaf: leaf.detach() if _is(leaf) else leaf, made)


def _copies(made):
    return tree_map(lambda leaf: leaf.clone() if _is(leaf) else leaf, made)
