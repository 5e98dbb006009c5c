"""``launch.worker`` on a machine without CUDA graphs: a stand-in records a step, and replays the device's part of it.

``stop_at=N`` among the overrides: a stop signal arrives in step N.
"""

import os
import signal
import sys

RECORDED = "a step was recorded"


def install() -> None:
    """A replay draws the numbers, and hands nothing to Megatron's own optimizer."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from forge_megatron.capture import Capturing
    from forge_megatron.megatron.optimizer import ForgeMegatronOptimizer
    from tests.cpu import replayer

    record, step_dense = replayer.Replayer.record, ForgeMegatronOptimizer.step_dense

    def telling(*arguments):
        print(RECORDED, flush=True)
        tracker = get_cuda_rng_tracker()
        drawn = tracker.get_states()
        recorded = record(*arguments)
        tracker.set_states(drawn)
        return recorded

    def without_grad(self):
        for p in self.get_parameters():
            p.grad = None
        return step_dense(self)

    replayer.Replayer.record, ForgeMegatronOptimizer.step_dense = telling, without_grad
    Capturing.capture = replayer.capturing


def stop_at(step: int) -> None:
    from forge_megatron.megatron.capture import CapturedTrainStep

    call, calls = CapturedTrainStep.__call__, []

    def stopping(self, *arguments):
        calls.append(None)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(self, *arguments)

    CapturedTrainStep.__call__ = stopping


def main(argv: list[str]) -> int:
    from launch import cpu, worker

    cpu.enable("cpu")
    install()
    for argument in argv:
        if argument.startswith("stop_at="):
            stop_at(int(argument.removeprefix("stop_at=")))
    return worker.main([argument for argument in argv if not argument.startswith("stop_at=")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
