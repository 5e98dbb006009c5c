"""torchrun's agent, with stop signals left to the workers.

The stock agent answers SIGTERM by ending its workers within 30 seconds, which a checkpoint may
outlast. This one passes SIGTERM and SIGINT on, and ends when its workers have; a second SIGINT
(Ctrl-C twice) ends them at once.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import psutil
from torch.distributed import run

_interrupts = 0


def _pass_on(number: int, frame: FrameType | None) -> None:
    global _interrupts
    _interrupts += number == signal.SIGINT
    for child in psutil.Process().children():
        child.send_signal(signal.SIGKILL if _interrupts > 1 else number)


def main(argv: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _pass_on)
    run.main(["--signals-to-handle", "SIGQUIT", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
