"""A stand-in for CUDA graphs on a machine that has none: it runs the device's part of a captured step."""

import contextlib

import torch
from torch.utils._pytree import tree_leaves

from forge_megatron import capture


class Replayer:
    """Records as a CUDA graph does: the host's part runs, the device's does not. Replays the device's part alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.recorded = 0

    @contextlib.contextmanager
    def beside(self):
        yield

    def record(self, function, table_bytes, generators):
        assert table_bytes > 0
        self.recorded += 1
        parameters = self.optimizer._parameters
        tensors = [*parameters.all, *(t for state in self.optimizer.state.values() for t in state.values())]
        tensors += [norms for _, _, norms in parameters._tables.values()]
        counters = set(parameters.counters())
        opened = [(parameters._written, dict(parameters._after))]
        device = [(t, t.detach().clone()) for t in tensors if t not in counters]
        drawn = torch.get_rng_state()
        made = function()
        torch.set_rng_state(drawn)
        norm, measured = self.optimizer._grad_norm, self.optimizer._measured[0]
        for tensor, value in device:
            tensor.data.copy_(value)

        def replay():
            host = [(counter, counter.clone()) for counter in parameters.counters()]
            now = parameters._written, dict(parameters._after), parameters.advanced
            # The recording has closed the window of its own replay.
            parameters._written, after = opened.pop() if opened else now[:2]
            parameters._after.update(after)
            # What the device reads of the host is written by now, or never.
            assert parameters._written is not None
            held, self.optimizer._skips.held = self.optimizer._skips.held, True
            again = function()
            self.optimizer._skips.held = held
            for mine, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                mine.copy_(new)
            norm.copy_(self.optimizer._grad_norm)
            measured.copy_(self.optimizer._measured[0])
            for counter, value in host:
                counter.copy_(value)
            parameters._written = now[0]
            parameters._after.update(now[1])
            parameters.advanced = now[2]

        return made, replay


_capture = capture.Capturing.capture


def capturing(self, step_function, **options):
    """In the place of ``Capturing.capture``: every optimizer that is asked to capture gets a Replayer."""
    self._graphs = self._graphs or Replayer(self)
    return _capture(self, step_function, **options)
