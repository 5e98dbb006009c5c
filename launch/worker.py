"""One rank's process, started by torchrun: ``-m launch.worker RECIPE [key=value ...]``.

Imports are inside ``main``: megatron-core's checkpoint writer spawns helpers that import this
module again.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    from launch import config, quiet

    quiet.hush()
    recipe = config.load(argv[0], argv[1:])
    from launch.distributed import process_groups

    with process_groups(recipe) as device:
        from launch.stop import StopSignals
        from launch.train import Trainer

        with StopSignals() as stop:
            Trainer(recipe, device).run(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
