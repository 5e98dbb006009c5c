"""Whatever of the public surface is not built is refused by name, never ignored."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import forge_megatron as forge
from tests.cpu.training import batch, mlp


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sharding": "full"}, "sharding='full'"),
        ({"backend": "hopper"}, "hopper"),
    ],
)
def test_an_option_that_is_not_built(options, match):
    model = mlp(6, 8, 4)
    with pytest.raises((NotImplementedError, ValueError), match=match):
        forge.attach(model, lr=1e-3, **options)
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, TypeError, "adamw needs lr="),
        ({"lr": 1e-3, "foreach": True}, TypeError, "no hyperparameter 'foreach'"),
        ({"lr": 1e-3, "fused": True}, TypeError, "no hyperparameter 'fused'"),
        ({"lr": 1e-3, "momentum": 0.9}, TypeError, "no hyperparameter 'momentum'"),
        ({"lr": 1e-3, "clip_gradnorm": 1.0}, TypeError, "no hyperparameter 'clip_gradnorm'"),
        ({"lr": -1e-3}, ValueError, "lr=-0.001"),
        ({"lr": float("nan")}, ValueError, "lr=nan"),
        ({"lr": 1e-3, "betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0"),
        ({"lr": 1e-3, "decoupled_weight_decay": False}, ValueError, "use the rule adam"),
        ({"lr": 1e-3, "recipe": "fp4"}, ValueError, "recipe='fp4' is unknown"),
        ({"lr": 1e-3, "recipe": "fp32-state", "state_format": "fp32"}, ValueError, "already names a state format"),
        ({"lr": 1e-3, "skip": "never"}, ValueError, "skip='never' is unknown"),
        ({"lr": 1e-3, "gradient_scale": "0.5"}, ValueError, "gradient_scale='0.5'"),
        ({"lr": 1e-3, "gradient_scale": True}, ValueError, "gradient_scale=True"),
        ({"lr": 1e-3, "sharding": "some"}, ValueError, "sharding='some' is unknown"),
        ({"lr": 1e-3, "sharding": "states"}, ValueError, "sharding='states' without process_group="),
        ({"lr": 1e-3, "buckets": forge.Buckets()}, ValueError, "buckets= without process_group="),
        ({"lr": 1e-3, "process_group": "world"}, TypeError, "process_group='world'"),
        ({"lr": 1e-3, "backend": "cuda"}, ValueError, "backend='cuda' is unknown"),
        ({"lr": 1e-3, "rule": "adamz"}, ValueError, r"no rule 'adamz'; there are: .*adamw.* sgd"),
        ({"lr": 1e-3, "rule": "sgd", "momentum": -0.9}, ValueError, "momentum=-0.9"),
    ],
)
def test_a_value_without_a_meaning(options, error, match):
    model = mlp(6, 8, 4)
    with pytest.raises(error, match=match):
        forge.attach(model, **options)
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]


def test_a_parameter_that_is_a_view_of_another_is_refused():  # field log row 30
    model = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
    model[1].weight = nn.Parameter(model[0].weight.detach().view(6, 6))
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are different parameters in the same memory"):
        forge.attach(model, lr=1e-3)
    model[1].weight = nn.Parameter(model[0].weight.detach()[2:])
    with pytest.raises(ValueError, match="in the same memory"):
        forge.attach(model, lr=1e-3)


def test_two_parameters_in_one_buffer_that_do_not_overlap_are_fine():
    """What flat-parameter wrappers make; as views of one tensor each write to one would look like both's."""
    flat = batch(2 * 36)
    model = nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)])
    for index, layer in enumerate(model):
        layer.weight = nn.Parameter(flat[36 * index : 36 * (index + 1)].view(6, 6))
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are views of one tensor"):
        forge.attach(model, lr=1e-3)
    for index, layer in enumerate(model):
        layer.weight = nn.Parameter(torch.empty(6, 6))
        layer.weight.data = flat[36 * index : 36 * (index + 1)].view(6, 6)
    optimizer = forge.attach(model, lr=1e-3)
    (model[1](model[0](batch(5, 6)))).square().mean().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_sparse_gradients_of_an_embedding_are_stepped_densely():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Linear(6, 3))
    twin = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 3))
    twin.load_state_dict(model.state_dict())
    optimizer = forge.attach(model, lr=1e-3)
    oracle = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    ids = torch.tensor([[1, 4, 4]])
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, oracle)):
            m(ids).square().mean().backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_import_does_not_import_the_compiler_or_triton():
    script = (
        "import sys, torch; before = set(sys.modules); import forge_megatron; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before if not m.startswith('torch.')}; "
        "assert 'torch._dynamo' not in sys.modules; print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["forge_megatron"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_model_is_not_ours(dtype):
    """Models are built in bf16 under torch.set_default_dtype, and attached to before it is set back."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, dtype=torch.float32)
    twin = copy.deepcopy(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        optimizer = forge.attach(model, "adamw", lr=1e-2)
        x = torch.ones(2, 4, dtype=torch.float32)
        model(x).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin(x).sum().backward()
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_switch_is_a_bool():
    with pytest.raises(ValueError, match="waiting='no'; give True or False"):
        forge.attach(torch.nn.Linear(4, 4), "adamw", lr=1e-2, waiting="no")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"nbytes": 0}, "nbytes=0"),
        ({"count": 1}, "count=1"),
        ({"wire_dtype": torch.float16}, r"wire_dtype=torch\.float16"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_a_bucket_without_a_meaning(options, match):
    with pytest.raises(ValueError, match=match):
        forge.Buckets(**options)
