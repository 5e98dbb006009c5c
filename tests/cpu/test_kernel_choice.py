"""Which kernel ``auto`` takes, by device, Triton's version and operands."""

import pytest
import torch

import forge_megatron.kernels.backend as backends
from forge_megatron.kernels import choose, measures_apart
from forge_megatron.kernels.choice import experts_by_hopper
from forge_megatron.kernels.cost import TILES
from forge_megatron.kernels.hopper_config import CONFIGS, choose_config


def clear():
    backends.is_hopper.cache_clear()
    backends.triton_version.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """A device of capability 9.0 and a Triton of a given version, neither of which need be there."""

    def pretend(version, capability=(9, 0)):
        clear()
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)

    yield pretend
    clear()


def test_auto_takes_the_hopper_kernel_only_where_it_runs(on_hopper):
    on_hopper("3.6.0")
    assert choose((4096, 4096), 512, "cuda") == "hopper"
    assert choose((4096, 4096), 512, "cuda", backend="triton") == "triton"
    assert choose((4096, 4096), 512, "cuda", accumulator=True) == "hopper"
    assert choose((4096, 4097), 512, "cuda", accumulator=True) == "triton"
    assert choose((4096, 4096), 512, "cuda", dtype=torch.float32) == "triton"
    assert choose((4096, 4097), 512, "cuda") == "triton"
    assert choose((4096, 4096), 0, "cuda") == "triton"
    assert choose((4096, 4096), 512, "cpu") == "reference"
    on_hopper("3.6.0", (8, 0))
    assert choose((4096, 4096), 512, "cuda") == "triton"
    with pytest.raises(ValueError, match=r'backend="hopper" needs compute capability 9\.0'):
        choose((4096, 4096), 512, "cuda", backend="hopper")


def test_a_shape_decides_between_the_hopper_kernel_and_cublas(on_hopper):
    """In the order of recipes/bench/results/h200_kernels.json: rounds of tiles that are nearly empty lose."""
    on_hopper("3.6.0")
    assert choose((1024, 1024), 512, "cuda") == "hopper"
    assert choose((1024, 1024), 8192, "cuda") == "cublas"
    assert choose((1024, 2560), 2048, "cuda") == "cublas"
    assert choose((14336, 4096), 8192, "cuda") == "hopper"
    assert choose_config(14336, 4096, 8192) == "co256"
    assert choose_config(4096, 2560, 8192) == "pp128"
    assert choose_config(1024, 1024, 512) == "pp64"


def test_the_configurations_have_the_tiles_that_their_cost_speaks_of():
    assert {name: (config.block_o, config.block_i) for name, config in CONFIGS.items()} == {
        name: (rows, columns) for name, (rows, columns, *_) in TILES.items()
    }


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_triton_whose_gluon_is_another_falls_back(on_hopper, version):
    on_hopper(version)
    assert choose((4096, 4096), 512, "cuda") == "cublas"
    with pytest.raises(RuntimeError, match=r'backend="hopper" needs Triton from 3\.6 and before 3\.10'):
        choose((4096, 4096), 512, "cuda", backend="hopper")


def test_a_version_that_was_only_compiled_is_taken_by_name_alone(on_hopper):
    on_hopper("3.9.0")
    assert choose((4096, 4096), 512, "cuda") == "cublas"
    assert choose((4096, 4096), 512, "cuda", backend="hopper") == "hopper"


def test_an_interpreted_triton_has_no_hopper_kernel(on_hopper, monkeypatch):
    on_hopper("3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose((4096, 4096), 512, "cuda") == "cublas"


@pytest.mark.parametrize(
    ("version", "capability", "backend", "taken"),
    [
        ("3.6.0", (9, 0), "auto", True),
        ("3.6.0", (9, 0), "triton", False),
        ("3.6.0", (9, 0), "cublas", False),
        ("3.6.0", (8, 0), "auto", False),
        ("3.9.0", (9, 0), "auto", False),
        ("3.9.0", (9, 0), "hopper", True),
    ],
)
def test_experts_in_one_tensor_take_the_hopper_kernel_where_it_was_run(on_hopper, version, capability, backend, taken):
    on_hopper(version, capability)
    assert experts_by_hopper(torch.device("cuda"), backend) is taken


def test_the_tokens_of_all_experts_decide_their_configuration():
    """In the order of recipes/bench/results/h200_experts.jsonl."""
    assert choose_config(1536, 2048, 8192, experts=64) == choose_config(1536, 2048, 4096, experts=64) == "pp64"
    assert choose_config(28672, 4096, 8192, experts=8) == "pp128"


@pytest.mark.parametrize(
    ("dtype", "device", "backend", "apart"),
    [
        (torch.bfloat16, "cuda", "auto", True),
        (torch.float16, "cuda", "cublas", True),
        (torch.float32, "cuda", "auto", False),
        (torch.bfloat16, "cuda", "triton", False),
        (torch.bfloat16, "cpu", "auto", False),
    ],
)
def test_cublas_forms_what_is_measured_where_it_multiplies_faster_than_the_portable_kernel(
    dtype, device, backend, apart
):
    assert measures_apart(dtype, device, backend) is apart
