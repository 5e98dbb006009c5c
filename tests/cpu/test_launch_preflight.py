"""A recipe that cannot run ends in one line that names the key, before any process group is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gates import gate
from launch import __main__ as launcher
from launch import config, gpus, preflight

ROOT = Path(__file__).resolve().parents[2]
GOOD = """
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2}
parallel: {tensor: 2, sequence: true}
data: {sequence_length: 64, synthetic: true}
batch: {total: 8, micro: 2}
optimizer: {lr: 1e-3}
run: {dir: RUN, steps: 10, device: cpu}
"""
GIB = 2**30
EXPERTS = ["model.num_experts=4"]
SHARDED = ("parallel.data=2", "parallel.distributed_optimizer=true")
INTERLEAVED = ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4")


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace("RUN", str(tmp_path / "run")))
    return lambda *overrides: config.load(str(path), list(overrides))


def refusal(recipe) -> config.RecipeError:
    with pytest.raises(config.RecipeError) as caught:
        preflight.check(recipe)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(caught.value.key + ": ")
    return caught.value


@pytest.mark.parametrize("override", ["model.num_experts=4", "optimizer.clip_grad=inf", "optimizer.backend=reference"])
def test_a_good_recipe_passes(load, override):
    assert preflight.check(load(override)) == "cpu"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["model.activation=relu"], "model.activation", "swiglu"),
        (["model.num_layers=0"], "model.num_layers", "above 0"),
        (["optimizer.clip_grad=-1"], "optimizer.clip_grad", "negative"),
        (["optimizer.clip_grad=nan"], "optimizer.clip_grad", "negative"),
        (["optimizer.lr=inf"], "optimizer.lr", "finite"),
        (["optimizer.beta2=1.0"], "optimizer.beta2", "below 1"),
        (["optimizer.eps=-1e-8"], "optimizer.eps", "negative"),
        (["optimizer.backend=cuda"], "optimizer.backend", "reference"),
        (["optimizer.backend=hopper"], "optimizer.backend", "cannot run on cpu"),
        (["optimizer.update=backward"], "optimizer.update", "optimizer.clip_grad=1.0, batch.total=8"),
        (["run.seed=-1"], "run.seed", "negative"),
        (["data.train_weights=[0.5,-0.5]"], "data.train_weights", "above 0"),
        (["data.cache=/proc/cache"], "data.cache", "cannot be written"),
        (["model.hidden_size=66"], "model.hidden_size", "num_attention_heads=4"),
        (["parallel.tensor=3"], "model.num_attention_heads", "parallel.tensor=3"),
        (["parallel.tensor=4"], "model.num_query_groups", "parallel.tensor=4"),
        (["model.ffn_hidden_size=129"], "model.ffn_hidden_size", "parallel.tensor=2"),
        (["model.kv_channels=15"], "model.kv_channels", "15"),
        (["parallel.tensor=1"], "parallel.sequence", "above 1"),
        (["data.sequence_length=63"], "data.sequence_length", "parallel.tensor * parallel.context=2"),
        (["batch.total=9"], "batch.total", "batch.micro"),
        (["run.reorder=true", "model.dropout=0.1"], "run.reorder", "model.dropout=0.1"),
        (["parallel.nodes=3"], "parallel.nodes", "3 nodes"),
        (["parallel.pipeline=4"], "model.num_layers", "parallel.pipeline=4"),
        (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline", "of 1 stages"),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=1"], "parallel.virtual_pipeline", "1F1B is null"),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], "model.num_layers", "virtual_pipeline=4"),
        ([*INTERLEAVED, "batch.total=6"], "batch.total", "parallel.pipeline=4"),
        ([*INTERLEAVED, "validation.samples=6"], "validation.samples", "parallel.pipeline=4"),
        (["parallel.context=3"], "data.sequence_length", "context=6"),
        (["parallel.context=64"], "data.sequence_length", "context=128"),
        (["parallel.context=4", "parallel.context_comm=a2a"], "model.num_attention_heads", "for context_comm=a2a=8"),
        (["parallel.context=2", "parallel.context_comm=p2p", "model.dropout=0.1"], "model.dropout", "p2p"),
        (["parallel.expert=2"], "parallel.expert", "model.num_experts"),
        ([*EXPERTS, "parallel.expert=2"], "parallel.expert", "parallel.data * parallel.context=1"),
        ([*EXPERTS, "parallel.expert=3"], "model.num_experts", "parallel.expert=3"),
        ([*EXPERTS, "model.expert_topk=5"], "model.expert_topk", "model.num_experts=4"),
        ([*EXPERTS, "model.expert_aux_loss=-1"], "model.expert_aux_loss", "negative"),
        ([*EXPERTS, "model.expert_ffn_hidden_size=33"], "model.expert_ffn_hidden_size", "parallel.tensor=2"),
        ([*EXPERTS, "model.bias=true"], "model.bias", "experts"),
        ([*EXPERTS, "run.reorder=true"], "run.reorder", "experts"),
        ([*EXPERTS, "parallel.sequence=false"], "parallel.sequence", "experts"),
        (["optimizer.warmup_steps=10"], "optimizer.warmup_steps", "10 decay steps"),
        (["optimizer.min_lr=1"], "optimizer.min_lr", "optimizer.lr"),
        (["data.synthetic=false"], "data.train", "launch.prepare"),
        (["data.synthetic=false", "data.train=[nowhere/train]"], "data.train", "nowhere/train.idx"),
        (["data.train=[x]"], "data.synthetic", "either"),
        (["data.tokenizer=no/such-folder"], "data.tokenizer", "no/such-folder"),
        (["model.vocab_size=200"], "model.vocab_size", "257"),
        (["run.dir=/proc/run"], "run.dir", "cannot be written"),
        (["model.transformer_engine=always"], "model.transformer_engine", "no CPU"),
        (["optimizer.rule=adamz"], "optimizer.rule", "adamw"),
        (["parallel.distributed_optimizer=true"], "parallel.distributed_optimizer", "parallel.data"),
        (["optimizer.recipe=fp33"], "optimizer.recipe", "fp33"),
        (["optimizer.use_forge=false", "optimizer.recipe=bf16-state"], "optimizer.recipe", "needs forge"),
        (["optimizer.use_forge=false", "optimizer.rule=sgd"], "optimizer.rule", "adamw"),
        (["optimizer.use_forge=false", "optimizer.tune=true"], "optimizer.tune", "needs optimizer.use_forge"),
        (
            ["optimizer.use_forge=false", "optimizer.fused_head=true"],
            "optimizer.fused_head",
            "needs optimizer.use_forge",
        ),
        (["model.dtype=bf16"], "optimizer.clip_grad", "fp32-master"),
    ],
)
def test_refused_by_key(load, monkeypatch, overrides, key, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refusal(load(*overrides))
    assert error.key == key
    assert said in str(error)


def test_megatron_core_built_for_another_python(load, monkeypatch):
    monkeypatch.setattr(preflight.importlib.machinery, "EXTENSION_SUFFIXES", [".cpython-39-other.so"])
    assert "not compiled for this Python" in str(refusal(load()))


def test_no_megatron_core(load, monkeypatch):
    def find_spec(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(preflight.importlib.util, "find_spec", find_spec)
    assert refusal(load()).key == "megatron-core"


def test_a_dataset_of_another_tokenizer(load, tmp_path):
    for suffix in (".idx", ".bin"):
        (tmp_path / f"train{suffix}").write_bytes(b"x")
    (tmp_path / "data.json").write_text('{"tokenizer": {"class": "HuggingFaceTokenizer", "name": "some"}}')
    error = refusal(load("data.synthetic=false", f"data.train=[{tmp_path}/train]"))
    assert error.key == "data.tokenizer"
    assert "HuggingFaceTokenizer" in str(error)


@pytest.fixture
def on_gpus(monkeypatch):
    def set_up(*found):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr(gpus, "query", lambda: list(found))

    return set_up


def free(number: int, gib: float = 100.0, processes=()) -> gpus.Gpu:
    return gpus.Gpu(f"GPU {number}", int(gib * GIB), 140 * GIB, tuple(processes))


def test_gpus_that_are_free(load, on_gpus):
    on_gpus(free(0), free(1))
    assert preflight.check(load("run.device=cuda")) == "cuda"


def test_more_ranks_than_gpus(load, on_gpus):
    on_gpus(free(0))
    error = refusal(load("run.device=cuda"))
    assert error.key == "parallel.tensor"
    assert "2 ranks" in str(error)
    assert "1 GPUs" in str(error)


def test_a_gpu_in_use(load, on_gpus):
    on_gpus(free(0), free(1, processes=[4711]))
    error = refusal(load("run.device=cuda"))
    assert error.key == "run.device"
    assert "GPU 1 is in use by process 4711" in str(error)


def test_a_gpu_in_use_that_the_job_does_not_take(load, on_gpus):
    on_gpus(free(0), free(1), free(2, processes=[4711]))
    assert preflight.check(load("run.device=cuda")) == "cuda"


def test_a_gpu_short_of_memory(load, on_gpus):
    on_gpus(free(0), free(1, gib=3.0))
    big = ["model.hidden_size=8192", "model.ffn_hidden_size=32768", "model.num_layers=8", "model.kv_channels=128"]
    error = refusal(load("run.device=cuda", *big))
    assert error.key == "parallel.tensor"
    assert "GPU 1 has 3.0 of 140.0 GiB free" in str(error)


def test_no_gpu(load, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refusal(load("run.device=cuda")).key == "run.device"


def test_nvml_that_does_not_answer(load, on_gpus, monkeypatch):
    on_gpus()

    def silent():
        raise OSError("NVML does not answer: driver not loaded")

    monkeypatch.setattr(gpus, "query", silent)
    assert refusal(load("run.device=cuda")).key == "run.check_gpus"
    assert preflight.check(load("run.device=cuda", "run.check_gpus=false")) == "cuda"


@pytest.mark.parametrize(
    ("recipe", "dtype", "bytes_a_weight"),
    [
        (None, "fp32", 12),
        (None, "bf16", 6),
        ("int8", "bf16", 4),
        ("bf16-state", "bf16", 6),
        ("fp32-master", "bf16", 14),
    ],
)
def test_state_bytes(load, recipe, dtype, bytes_a_weight):
    """Weights of the good recipe by hand: qkv and proj, three SwiGLU matrices, two layers; no vocabulary given."""
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    loaded = load(f"optimizer.recipe={recipe or 'null'}", f"model.dtype={dtype}")
    assert preflight.state_bytes(loaded) == weights * bytes_a_weight // 2
    staged = load("parallel.pipeline=2", f"optimizer.recipe={recipe or 'null'}", f"model.dtype={dtype}")
    assert preflight.state_bytes(staged) == weights * bytes_a_weight // 4
    shared = load(f"optimizer.recipe={recipe or 'null'}", f"model.dtype={dtype}", *SHARDED)
    wide = {"fp32": 4, "bf16": 2}[dtype]
    assert preflight.state_bytes(shared) == weights * (wide + (bytes_a_weight - wide) // 2) // 2


def test_state_bytes_of_experts(load):
    """Two of the four experts of each layer on a rank: three matrices of 32 hidden channels each."""
    experts = ("model.num_experts=4", "model.expert_ffn_hidden_size=32", "parallel.expert=2", "parallel.data=2")
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 2 * 3 * 64 * 32)
    assert preflight.state_bytes(load(*experts)) == weights * 12 // 2


def test_the_command_ends_in_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace("RUN", str(tmp_path / "run")))
    command = [sys.executable, "-m", "launch", str(path), "model.hidden_size=66"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [ended.stderr.strip()]
    assert ended.stderr.startswith("launch: model.hidden_size: 66 is not divisible")
    assert ended.stdout == ""


def test_a_job_with_sharded_states_asks_for_their_gates(load):
    arguments = launcher.gate_arguments(load(*SHARDED), "cpu")
    assert " ".join(arguments).startswith("--tp 2 --dp 2 --device cpu --dtype fp32 --sharding states")
    ids = {case.gate for case in gate.required(gate.Degrees(tp=2, dp=2), True, "fp32", "cpu", "states")}
    assert {"TP", "T0", "T1", "T2"} <= ids


@pytest.mark.parametrize("code", [1, 3, -9])
def test_gates_that_refuse_end_the_launch_with_3(tmp_path, monkeypatch, code):
    """Whatever way the gates end but green, nothing is started."""
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace("RUN", str(tmp_path / "run")))
    asked = []

    def gates(command, **options):
        asked.append((command, options))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(launcher.subprocess, "run", gates)
    monkeypatch.setattr(launcher.os, "execve", lambda *_: pytest.fail("training was started"))
    assert launcher.main([str(path)]) == 3
    (command, options), *rest = asked
    assert not rest
    job = ["--tp", "2", "--device", "cpu", "--dtype", "fp32", "--sp"]
    assert command[1:] == ["-m", "gates", *job, "--ensure"]
    assert options["cwd"] == ROOT


def test_green_gates_start_torchrun(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD.replace("RUN", str(tmp_path / "run")))
    monkeypatch.setattr(launcher.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    started = []
    monkeypatch.setattr(launcher.os, "execve", lambda *arguments: started.append(arguments))
    launcher.main([str(path), "run.steps=3"])
    ((_, command, _),) = started
    assert command[1:3] == ["-m", "launch.agent"]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[-4:] == ["-m", "launch.worker", str(path), "run.steps=3"]


ONE_GPU = ("run.capture=true", "run.device=cuda", "parallel.tensor=1", "parallel.sequence=false")


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["run.device=cpu"], "run.capture", "run.device=cuda"),
        (["optimizer.use_forge=false"], "run.capture", "optimizer.use_forge=true"),
        (["parallel.tensor=2"], "parallel.tensor", "run.capture=false"),
        (["parallel.data=2"], "parallel.data", "run.capture=false"),
        (["parallel.pipeline=2"], "parallel.pipeline", "run.capture=false"),
        (["parallel.context=2"], "parallel.context", "run.capture=false"),
        (EXPERTS, "model.num_experts", "run.capture=false"),
        (["run.deterministic=true"], "run.deterministic", "run.capture=false"),
        (["model.dropout=0.1", "model.recompute=full"], "model.recompute", "dropout"),
    ],
)
def test_what_cannot_be_captured(load, monkeypatch, overrides, key, said):
    monkeypatch.setattr(preflight, "resolve_device", lambda recipe: recipe.run.device)
    error = refusal(load(*ONE_GPU, *overrides))
    assert error.key == key
    assert said in str(error)
