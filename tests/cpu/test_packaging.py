"""What is installed, what importing it costs, and what must not be in the repository."""

import ast
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
HEAVY = [
    "triton",
    "megatron",
    "omegaconf",
    "rich",
    "transformers",
    "accelerate",
    "tensorboard",
    "numpy.testing",
    "matplotlib",
]


def setup_arguments() -> dict:
    """The keyword arguments of setup(), by running setup.py with a setup() that only keeps them."""
    code = (
        "import json, runpy, setuptools; kept = {}; setuptools.setup = lambda **kw: kept.update(kw);"
        "runpy.run_path('setup.py'); print(json.dumps(kept))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout)


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in names.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_importing_the_package_loads_torch_and_nothing_else_that_is_heavy():
    code = f"import forge_megatron, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    before = subprocess.run(
        [sys.executable, "-c", f"import torch, sys; print([name for name in {HEAVY!r} if name in sys.modules])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert ast.literal_eval(loaded) == ast.literal_eval(before)
    assert not {"triton", "megatron", "omegaconf", "rich", "transformers"} & set(ast.literal_eval(loaded))


def test_importing_the_package_is_fast():
    """Its own modules take a small part of torch's own import, measured in one process by the interpreter.

    The interpreter's clock runs on while another process has the core: the best of a few is the package's own.
    """
    command = [sys.executable, "-X", "importtime", "-c", "import torch; import forge_megatron"]
    best = math.inf
    for _ in range(4):
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        own = sum(int(line.split("|")[0].split(":")[1]) for line in report.splitlines() if "forge_megatron" in line)
        assert own > 0
        best = min(best, own)
        if best < 500_000:
            return
    pytest.fail(f"forge_megatron's own modules took {best} µs")


def test_importing_without_triton_or_megatron_works():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('triton', 'megatron'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import torch, forge_megatron as forge\n"
        "model = torch.nn.Linear(4, 3)\n"
        "before = model.weight.detach().clone()\n"
        "optimizer = forge.attach(model, 'adamw', lr=0.1)\n"
        "model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
        "assert not torch.equal(before, model.weight)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_only_the_package_is_installed():
    packages = setup_arguments()["packages"]
    assert "forge_megatron" in packages
    assert {name.split(".")[0] for name in packages} == {"forge_megatron"}
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in tracked("forge_megatron/**/*.py")}
    assert folders <= set(packages), "a folder without __init__.py would be missing from the wheel"


def test_dependencies_are_ranges_and_never_name_apex():
    kept = setup_arguments()
    requirements = [Requirement(line) for line in sum(kept["extras_require"].values(), kept["install_requires"])]
    assert {r.name for r in map(Requirement, kept["install_requires"])} == {
        "torch",
        "triton",
        "omegaconf",
        "rich",
        "numpy",
    }
    assert {"megatron", "nvml", "deepspeed", "bench", "test"} <= set(kept["extras_require"])
    assert all(r.specifier and not any(s.operator == "==" for s in r.specifier) for r in requirements)
    assert "apex" not in {r.name for r in requirements}
    megatron = next(r for r in requirements if r.name == "megatron-core")
    assert [v in megatron.specifier for v in ("0.15.3", "0.16.1", "0.19.2", "0.20.0")] == [False, True, True, False]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_constraint_lies_in_the_range_that_users_get(python: str):
    lines = [line for line in (ROOT / "requirements/constraints.txt").read_text().splitlines() if line[:1].strip("#")]
    pins = [Requirement(line) for line in lines]
    pins = {r.name.lower(): r for r in pins if r.marker is None or r.marker.evaluate({"python_version": python})}
    kept = setup_arguments()
    extras = {name: wants for name, wants in kept["extras_require"].items() if name in ("launch", "megatron", "test")}
    for wanted in map(Requirement, sum(extras.values(), kept["install_requires"])):
        pin = pins[wanted.name.lower()]
        version = next(iter(pin.specifier)).version
        assert version in wanted.specifier, f"{pin} is outside of {wanted}"


def test_the_version_is_written_once():
    import forge_megatron

    assert setup_arguments()["version"] == forge_megatron.__version__
    assert f"## {forge_megatron.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text()).get("project", {})


def test_no_file_holds_a_path_of_one_machine():
    home = "|".join(("home", "root", "work", "opt/pypi", "opt/wheels", "tmp/envs", "Users"))
    absolute = re.compile(rf"(?<![\w.$}}~-])/(?:{home})/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.suffix not in (".png", ".bin", ".idx")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if absolute.search(line)
    ]
    assert not found, "\n".join(found)
