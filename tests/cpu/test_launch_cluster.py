"""Where nodes meet: SLURM's variables, and the ways in which they mislead (field rows 134 to 137)."""

import socket
import stat

import pytest

from launch import cluster, config

TWO_NODES = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


@pytest.fixture
def recipe():
    def build(nodes: int = 2, tensor: int = 8, data: int = 2) -> config.Recipe:
        return config.Recipe(parallel=config.Parallel(tensor=tensor, data=data, nodes=nodes))

    return build


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A ``scontrol`` that knows the two nodes, and a name service that knows their addresses."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[07-08]" ] && echo gpu07 && echo gpu08\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    addresses = {"gpu07": "10.1.0.7", "gpu08": "10.1.0.8"}
    names(monkeypatch, addresses)
    return addresses


def names(monkeypatch, addresses: dict[str, str]) -> None:
    def getaddrinfo(host, port, *_, **__):
        if host not in addresses and not host[0].isdigit():
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.get(host, host), port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def refusal(recipe, environment) -> config.RecipeError:
    with pytest.raises(config.RecipeError) as caught:
        cluster.rendezvous(recipe, environment)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_endpoint_is_the_first_host_of_the_job_and_not_the_node_that_submitted_it(recipe, scontrol):
    place = cluster.rendezvous(recipe(), TWO_NODES)
    assert place == cluster.Rendezvous(nodes=2, node_rank=1, host="gpu07", port=20000 + 4242)
    assert TWO_NODES["SLURM_LAUNCH_NODE_IPADDR"] not in place.torchrun_arguments(8, "gpu08")


def test_torchrun_is_told_this_nodes_name(recipe, scontrol):
    """Row 134: left to itself it looks up a full name that other nodes may not resolve."""
    place = cluster.rendezvous(recipe(), TWO_NODES)
    given = place.torchrun_arguments(8, "gpu08")
    pairs = dict(zip(given[::2], given[1::2], strict=True))
    assert pairs["--local-addr"] == "gpu08"
    assert (pairs["--master-addr"], pairs["--nnodes"], pairs["--node-rank"]) == ("gpu07", "2", "1")
    assert pairs["--nproc-per-node"] == "8"
    first = cluster.rendezvous(recipe(), {**TWO_NODES, "SLURM_NODEID": "0"}).torchrun_arguments(8, "gpu07.cluster.long")
    assert first[first.index("--local-addr") + 1] == "gpu07"


@pytest.mark.parametrize("given", ["gpu07", "10.1.0.7"])
def test_master_addr_may_be_a_short_name_or_an_address(recipe, scontrol, given):
    place = cluster.rendezvous(recipe(), {**TWO_NODES, "MASTER_ADDR": given, "MASTER_PORT": "29500"})
    assert (place.host, place.port) == (given, 29500)


@pytest.mark.parametrize("answer", ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0"])
def test_a_loopback_answer_is_refused(recipe, scontrol, monkeypatch, answer):
    names(monkeypatch, {**scontrol, "gpu07": answer})
    error = refusal(recipe(), TWO_NODES)
    assert error.key == "MASTER_ADDR"
    assert f"gpu07 resolves to {answer}" in str(error)


def test_a_name_that_does_not_resolve_is_refused_after_waiting(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(cluster.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    names(monkeypatch, {})
    with pytest.raises(config.RecipeError, match=r"^MASTER_ADDR: gpu07 does not resolve"):
        cluster.resolve("gpu07")
    assert 29 <= clock[0] <= 31


def test_a_name_that_resolves_late_is_taken(monkeypatch):
    monkeypatch.setattr(cluster.time, "sleep", lambda _: names(monkeypatch, {"gpu07": "10.1.0.7"}))
    names(monkeypatch, {})
    assert cluster.resolve("gpu07") == ["10.1.0.7"]


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS", "4 tasks on 2 nodes"),
        ({"SLURM_NNODES": "4", "SLURM_NTASKS": "4"}, "parallel.nodes", "SLURM started 4"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID", "second agent on gpu08"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "parallel.tensor", "8 ranks on a node, and SLURM gave it 4 GPUs"),
        ({"SLURM_JOB_NODELIST": "gpu[07-09]"}, "SLURM_JOB_NODELIST", "scontrol"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_NTASKS", "--ntasks-per-node=1"),
        ({"MASTER_PORT": "ssh"}, "MASTER_PORT", "'ssh' is no port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT", "1 to 65535"),
    ],
)
def test_sizes_that_do_not_add_up(recipe, scontrol, change, key, said):
    error = refusal(recipe(), {**TWO_NODES, **change})
    assert error.key == key
    assert said in str(error)


def test_several_nodes_outside_srun(recipe, scontrol):
    batch_script = {k: v for k, v in TWO_NODES.items() if k not in ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")}
    assert "srun" in str(refusal(recipe(), batch_script))


def test_one_node_meets_itself(recipe):
    place = cluster.rendezvous(recipe(nodes=1, data=1), {})
    assert place.torchrun_arguments(8, "anything")[-3:] == ["--standalone", "--local-addr", "127.0.0.1"]


def test_one_node_and_several_tasks(recipe):
    started = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}
    assert "8 tasks" in str(refusal(recipe(nodes=1, data=1), started))


def test_nodes_without_slurm(recipe, scontrol):
    by_hand = {"MASTER_ADDR": "gpu07", "NODE_RANK": "1"}
    assert cluster.rendezvous(recipe(), by_hand) == cluster.Rendezvous(2, 1, "gpu07", 20000)
    assert refusal(recipe(), {"MASTER_ADDR": "gpu07"}).key == "parallel.nodes"
    assert refusal(recipe(), {**by_hand, "NODE_RANK": "2"}).key == "NODE_RANK"
