"""Where the nodes of a job meet: torchrun's rendezvous, from SLURM's variables or from the user's.

The endpoint is the first host of the job's node list, never the node that submitted the job
(SLURM_LAUNCH_NODE_IPADDR may be a login node); it must have an address that is not a loopback; and
each node runs one agent.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from launch.config import Recipe, RecipeError

_RESOLVE_SECONDS = 30.0
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True)
class Rendezvous:
    """One node's place in the job. ``host`` is None for a job of one node."""

    nodes: int
    node_rank: int
    host: str | None
    port: int

    def torchrun_arguments(self, ranks_per_node: int, here: str) -> list[str]:
        """Arguments for ``torch.distributed.run``; ``here`` is this node's own name or address."""
        common = ["--nproc-per-node", str(ranks_per_node), "--max-restarts", "0"]
        if self.host is None:
            return [*common, "--standalone", "--local-addr", "127.0.0.1"]
        return [
            *common,
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank)),
            *("--master-addr", self.host, "--master-port", str(self.port)),
            # Otherwise torchrun looks up this machine's full name, which other nodes may not resolve.
            *("--local-addr", self.host if self.node_rank == 0 else here),
        ]


def _hosts(node_list: str) -> list[str]:
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RecipeError("SLURM_JOB_NODELIST", f"scontrol could not expand {node_list!r}: {error}") from error
    return answer.stdout.split()


def _count(environment: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def _port(environment: Mapping[str, str], default: int) -> int:
    """MASTER_PORT, or ``default`` where it is not set."""
    text = environment.get("MASTER_PORT") or str(default)
    if not text.isdigit() or not 0 < int(text) < 2**16:
        raise RecipeError("MASTER_PORT", f"{text!r} is no port: give a number from 1 to 65535")
    return int(text)


def _from_slurm(environment: Mapping[str, str], nodes: int) -> Rendezvous:
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    started = _count(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if "SLURM_NODEID" not in environment or "SLURM_PROCID" not in environment:
        raise RecipeError("SLURM_NODEID", "several nodes start under srun, one task each: see slurm/pretrain.sbatch")
    if started != nodes:
        raise RecipeError("parallel.nodes", f"{nodes} nodes in the recipe, and SLURM started {started}")
    if tasks != nodes:
        raise RecipeError(
            "SLURM_NTASKS", f"{tasks} tasks on {nodes} nodes: one agent a node starts its ranks, --ntasks-per-node=1"
        )
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise RecipeError("SLURM_LOCALID", f"a second agent on {environment.get('SLURMD_NODENAME', 'this node')}")
    hosts = _hosts(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) != nodes:
        raise RecipeError("SLURM_JOB_NODELIST", f"{len(hosts)} hosts ({', '.join(hosts)}) for {nodes} nodes")
    port = _port(environment, _FIRST_PORT + (_count(environment, "SLURM_JOB_ID") or 0) % _PORTS)
    return Rendezvous(nodes, int(environment["SLURM_NODEID"]), environment.get("MASTER_ADDR") or hosts[0], port)


def _from_user(environment: Mapping[str, str], nodes: int) -> Rendezvous:
    for name in ("MASTER_ADDR", "NODE_RANK"):
        if not environment.get(name):
            raise RecipeError("parallel.nodes", f"{nodes} nodes: outside SLURM each needs MASTER_ADDR and NODE_RANK")
    rank = _count(environment, "NODE_RANK")
    if rank is None or rank >= nodes:
        raise RecipeError("NODE_RANK", f"{environment['NODE_RANK']!r} is not a node of parallel.nodes={nodes}")
    return Rendezvous(nodes, rank, environment["MASTER_ADDR"], _port(environment, _FIRST_PORT))


def _is_reachable(address: str) -> bool:
    """From another node: neither a loopback nor the address of no machine (``0.0.0.0``)."""
    parsed = ipaddress.ip_address(address.split("%")[0])
    return not (parsed.is_loopback or parsed.is_unspecified)


def resolve(host: str, seconds: float = _RESOLVE_SECONDS) -> list[str]:
    """``host``'s addresses on this node, waiting up to ``seconds`` for the name service.

    Raises:
        RecipeError: it does not resolve, or only to loopback addresses.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise RecipeError(
                    "MASTER_ADDR",
                    f"{host} does not resolve on {socket.gethostname()} ({error}): set MASTER_ADDR to the first "
                    "node's address",
                ) from error
            time.sleep(min(1.0, seconds))
    if not any(_is_reachable(address) for address in found):
        raise RecipeError(
            "MASTER_ADDR",
            f"{host} resolves to {', '.join(found)} on {socket.gethostname()}, which other nodes cannot reach: give "
            "it its network address in /etc/hosts, or set MASTER_ADDR",
        )
    return found


def rendezvous(recipe: Recipe, environment: Mapping[str, str]) -> Rendezvous:
    """This node's place in the job.

    Raises:
        RecipeError: the job's shape is not the recipe's, or the endpoint cannot work.
    """
    nodes = recipe.parallel.nodes
    ranks = recipe.world_size // nodes
    under_srun = "SLURM_PROCID" in environment
    if nodes == 1:
        tasks = _count(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if under_srun else 1
        if tasks != 1:
            raise RecipeError("parallel.nodes", f"1 node in the recipe, and SLURM started {tasks} tasks")
        place = Rendezvous(1, 0, None, 0)
    else:
        place = (_from_slurm if "SLURM_JOB_ID" in environment else _from_user)(environment, nodes)
        resolve(place.host)
    gpus = _count(environment, "SLURM_GPUS_ON_NODE")
    if gpus is not None and ranks > gpus:
        raise RecipeError("parallel.tensor", f"{ranks} ranks on a node, and SLURM gave it {gpus} GPUs")
    return place
