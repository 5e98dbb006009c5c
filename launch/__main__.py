"""``python -m launch RECIPE [key=value ...]``: preflight, gates, torchrun, training.

Exit codes: 0 trained, or stopped with a checkpoint; 1 training failed; 2 the recipe cannot run;
3 the gates refuse.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from launch import cluster, config, preflight, quiet

CANNOT_RUN, REFUSED = 2, 3
ROOT = Path(__file__).resolve().parents[1]


def gate_arguments(recipe: config.Recipe, device: str) -> list[str]:
    p = recipe.parallel
    degrees = {"tp": p.tensor, "pp": p.pipeline, "cp": p.context, "ep": p.expert, "dp": p.data}
    arguments = [word for axis, n in degrees.items() if n > 1 or axis == "tp" for word in (f"--{axis}", str(n))]
    arguments += ["--device", device, "--dtype", recipe.model.dtype]
    arguments += ["--sharding", "states"] if p.distributed_optimizer else []
    return [*arguments, *(["--sp"] if p.sequence else []), "--ensure"]


def worker_environment(recipe: config.Recipe, device: str) -> dict[str, str]:
    """This process's environment with what must be there before a worker imports torch."""
    environment = dict(os.environ)
    if device == "cuda" and recipe.parallel.tensor > 1:
        # One hardware queue keeps Megatron's order of collectives and GEMMs, on which its overlap rests.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu":
        ranks = recipe.world_size // recipe.parallel.nodes
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return environment


def launch(name: str, overrides: list[str]) -> int:
    """Run a recipe on this node.

    Raises:
        RecipeError: it cannot run.
    """
    recipe = config.load(name, overrides)
    device = preflight.check(recipe)
    place = cluster.rendezvous(recipe, os.environ)
    if place.node_rank == 0:
        # From the checkout's root, so that no other folder's "gates" answers.
        gates = [sys.executable, "-m", "gates", *gate_arguments(recipe, device)]
        if subprocess.run(gates, cwd=ROOT).returncode:
            return REFUSED
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    torchrun = place.torchrun_arguments(recipe.world_size // recipe.parallel.nodes, here)
    command = [sys.executable, "-m", "launch.agent", *torchrun, "-m", "launch.worker", name, *overrides]
    sys.stdout.flush()
    os.execve(sys.executable, command, worker_environment(recipe, device))


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else CANNOT_RUN
    quiet.hush()
    try:
        return launch(argv[0], argv[1:])
    except config.RecipeError as error:
        print(f"launch: {error}", file=sys.stderr)
        return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
