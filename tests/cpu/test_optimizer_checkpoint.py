"""state_dict: bit-exact resume, torch.optim's checkpoints both ways, and errors before anything has changed."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import forge_megatron as forge
from tests.cpu.training import Pair, backends, batch, expect_bit_equal, mean_square, mlp, snapshot

recipes = {
    "default": {},
    "clipped": {"clip_grad_norm": 0.05},
    "bf16": {"dtype": torch.bfloat16},
    "bf16-state": {"recipe": "bf16-state"},
    "fp32-master": {"recipe": "fp32-master", "dtype": torch.bfloat16},
}


def run(steps, options, saved=None):
    """Trains by a schedule from where ``saved`` was; returns everything that a resume needs, and the norms."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    model = mlp(6, 8, 4).to(dtype)
    optimizer = forge.attach(model, lr=1e-2, **options)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    norms = []
    for seed in steps:
        model(batch(5, 6, seed=seed).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        norms.append(optimizer.grad_norm.item())
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return {name: part.state_dict() for name, part in parts.items()} | {"norms": norms}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Five more steps of every recipe, in a new process."""
    path = tmp_path_factory.mktemp("resume") / "saved"
    torch.save({name: run(range(5), options) for name, options in recipes.items()}, path)
    script = (
        "import torch; from tests.cpu.test_optimizer_checkpoint import recipes, run; "
        f"saved = torch.load({str(path)!r}, weights_only=True); "
        "rest = {name: run(range(5, 10), options, saved[name]) for name, options in recipes.items()}; "
        f"torch.save(rest, {str(path)!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", recipes)
def test_ten_steps_equal_five_and_five_in_a_new_process(name, resumed):  # field log rows 118, 119
    """Weights, states, steps, schedule, and the norms of the first two steps after the resume."""
    expected, rest = run(range(10), recipes[name]), resumed[name]
    expect_bit_equal(list(expected["model"].values()), list(rest["model"].values()))
    assert rest["norms"] == expected["norms"][5:]
    assert expected["schedule"] == rest["schedule"]
    for key, state in expected["optimizer"]["state"].items():
        assert state["step"] == 10
        expect_bit_equal(list(state.values()), list(rest["optimizer"]["state"][key].values()))


def trained(steps=3, seed=0, **options):
    model = mlp(6, 8, 4, seed=seed)
    optimizer = forge.attach(model, lr=1e-3, **options)
    for step in range(steps):
        model(batch(5, 6, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_moments_are_restored_and_missing_ones_are_an_error():  # field log row 120
    model, optimizer = trained()
    before = snapshot(model, optimizer)
    saved = optimizer.state_dict()
    saved["state"] = {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    optimizer.load_state_dict(saved)
    expect_bit_equal(before, snapshot(model, optimizer))
    for broken in ("exp_avg", "exp_avg_sq", "step"):
        short = {**saved, "state": {k: dict(v) for k, v in saved["state"].items()}}
        del short["state"][2][broken]
        with pytest.raises(ValueError, match=rf"^2\.weight: the checkpoint has no '{broken}'"):
            optimizer.load_state_dict(short)
    short = {**saved, "state": {k: v for k, v in saved["state"].items() if k != 2}}
    with pytest.raises(ValueError, match=r"^2\.weight: the checkpoint has no state"):
        optimizer.load_state_dict(short)
    for part in ("state", "param_groups"):
        with pytest.raises(ValueError, match=f"no '{part}'"):
            optimizer.load_state_dict({k: v for k, v in saved.items() if k != part})
    expect_bit_equal(before, snapshot(model, optimizer))


def test_a_bad_hyperparameter_in_the_file_changes_nothing():
    model, optimizer = trained()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = -1.0
    other, restored = trained(1, seed=1)
    before = snapshot(other, restored)
    with pytest.raises(ValueError, match=r"eps=-1\.0"):
        restored.load_state_dict(saved)
    expect_bit_equal(before, snapshot(other, restored))
    assert model is not other


def test_the_step_count_is_restored():  # field log row 121
    """With step 0 the bias correction would make the first update about ten times too large."""
    model, optimizer = trained(steps=1)
    for state in optimizer.state.values():
        state["step"].fill_(1000)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = optimizer.state_dict()
    other = mlp(6, 8, 4)
    other.load_state_dict(weights)
    restored = forge.attach(other, lr=1e-3)
    restored.load_state_dict(saved)
    for m, o in ((model, optimizer), (other, restored)):
        m(batch(5, 6)).square().mean().backward()
        o.step()
    assert restored.state[other[0].weight]["step"] == 1001
    expect_bit_equal(snapshot(model, optimizer), snapshot(other, restored))
    moved = (other[0].weight - weights["0.weight"]).abs().max()
    # After 1000 steps of no history sqrt(1 - 0.999 ** 1001) / (1 - 0.9 ** 1001) scales it, not 1.
    assert moved < 0.01 * 1e-3 * 1000


@pytest.mark.parametrize("recipe", ["bf16-state", "fp32-state", "fp32-master"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_keep_their_dtype_on_load(recipe, dtype):  # field log row 105
    def build():
        model = mlp(6, 8, 4).to(dtype)
        return model, forge.attach(model, lr=1e-2, recipe=recipe)

    def train(model, optimizer, seed):
        model(batch(5, 6, seed=seed).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    for seed in range(5):
        train(model, optimizer, seed)
    other, restored = build()
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    expected = torch.bfloat16 if recipe == "bf16-state" else torch.float32
    for state in restored.state.values():
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is expected
        assert ("master" in state) is (recipe == "fp32-master" and dtype is torch.bfloat16)
    expect_bit_equal(snapshot(model, optimizer), snapshot(other, restored))
    train(model, optimizer, 5), train(other, restored, 5)
    expect_bit_equal(snapshot(model, optimizer), snapshot(other, restored))


def test_a_state_of_another_dtype_is_converted_only_when_asked():
    _, optimizer = trained(recipe="bf16-state")
    other, restored = trained(steps=1, seed=1)
    before = snapshot(other, restored)
    with pytest.raises(ValueError, match=r"^0\.weight: exp_avg is torch\.bfloat16 in the checkpoint, torch\.float32"):
        restored.load_state_dict(optimizer.state_dict())
    expect_bit_equal(before, snapshot(other, restored))
    restored.load_state_dict(optimizer.state_dict(), convert=True)
    for ours, theirs in zip(restored.state.values(), optimizer.state.values(), strict=True):
        assert ours["exp_avg"].dtype is torch.float32
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"].float())


@backends
@pytest.mark.parametrize("named", [True, False])
def test_a_torch_adamw_checkpoint_is_loaded(backend, named):  # field log row 127
    pair = Pair(mlp(6, 8, 4), backend=backend)
    if named:
        pair.oracle = torch.optim.AdamW(pair.twin.named_parameters(), lr=1e-3)
    for seed in range(3):
        pair.twin(batch(5, 6, seed=seed)).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
    pair.model.load_state_dict(pair.twin.state_dict())
    pair.optimizer.load_state_dict(pair.oracle.state_dict())
    pair.expect_equal(atol=0)
    pair.train(mean_square(batch(5, 6, seed=9)))
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[0].weight]["step"] == 4


def test_a_torch_adamw_checkpoint_of_a_parameter_that_never_had_a_gradient():
    pair = Pair(nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]))
    for seed in range(2):
        pair.twin[0](batch(5, 6, seed=seed)).square().mean().backward()
        pair.oracle.step()
        pair.oracle.zero_grad()
    pair.model.load_state_dict(pair.twin.state_dict())
    pair.optimizer.load_state_dict(pair.oracle.state_dict())
    pair.train(lambda model: model[0](batch(5, 6)).sum() + model[1](batch(5, 6)).square().mean())
    pair.expect_equal()
    assert pair.optimizer.state[pair.model[1].weight]["step"] == 1


def test_our_checkpoint_is_loaded_by_torch_adamw():
    pair = Pair(mlp(6, 8, 4))
    pair.train(*(mean_square(batch(5, 6, seed=seed)) for seed in range(3)))
    twin = mlp(6, 8, 4)
    twin.load_state_dict(pair.model.state_dict())
    for params in (twin.parameters(), twin.named_parameters()):
        theirs = torch.optim.AdamW(params, lr=5.0)
        # torch's load_state_dict keeps the tensors that it is given.
        theirs.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    assert theirs.param_groups[0]["lr"] == 1e-3
    pair.twin, pair.oracle = twin, theirs
    pair.expect_equal(atol=0)
    pair.train(mean_square(batch(5, 6, seed=7)))
    pair.expect_equal()


def test_parameters_are_matched_by_name():  # field log row 127
    """Two of one shape, in the other order: by order alone each would get the other's moments."""

    def build(order):
        torch.manual_seed(0)
        layers = {name: nn.Linear(6, 6) for name in ("a", "b")}
        model = nn.ModuleDict({name: layers[name] for name in order})
        return model, forge.attach(model, lr=1e-3)

    def train(model, optimizer):
        model["b"](torch.tanh(model["a"](batch(5, 6)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build("ab")
    train(model, optimizer)
    other, restored = build("ba")
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    for name in "ab":
        expected = list(optimizer.state[model[name].weight].values())
        expect_bit_equal(expected, list(restored.state[other[name].weight].values()))
    train(model, optimizer), train(other, restored)
    for name in "ab":
        assert torch.equal(model[name].weight, other[name].weight)


def test_a_checkpoint_of_another_model_is_refused_by_name():
    _, optimizer = trained()
    other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 4))
    restored = forge.attach(other, lr=1e-3)
    with pytest.raises(ValueError, match=r"differ in 2\.bias, 2\.weight, 3\.bias, 3\.weight"):
        restored.load_state_dict(optimizer.state_dict())
    wider = mlp(6, 9, 4)
    restored = forge.attach(wider, lr=1e-3)
    with pytest.raises(ValueError, match=r"^0\.weight: exp_avg is \[8, 6\] in the checkpoint, \[9, 6\]"):
        restored.load_state_dict(optimizer.state_dict())
    restored = forge.attach(mlp(6, 8, 4), "sgd", lr=1e-3)
    with pytest.raises(ValueError, match="written by rule 'adamw', not 'sgd'"):
        restored.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("fails", [False, True], ids=["pending", "failed"])
def test_a_load_discards_the_whole_window(fails):
    """Not the owned weights' half of it: the biases' .grad would be stepped alone."""
    model = mlp(6, 8, 4)
    optimizer = forge.attach(model, lr=1e-2, waiting=True)
    saved = copy.deepcopy(optimizer.state_dict())
    x = batch(5, 6).requires_grad_()
    if fails:
        x.register_hook(lambda gradient: 1 / 0)
    loss = model(x).square().mean()
    if fails:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    else:
        loss.backward()
    assert model[2].bias.grad is not None
    optimizer.load_state_dict(saved)
    before = snapshot(model, optimizer)
    del loss
    optimizer.step()
    expect_bit_equal(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


def test_a_load_keeps_gradients_that_are_all_in_grad():
    pair = Pair(nn.Conv1d(2, 3, 2))
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair.sides()]
    pair.backward(mean_square(batch(4, 2, 5)))
    for (_, optimizer), state in zip(pair.sides(), saved, strict=True):
        optimizer.load_state_dict(state)
    pair.close()
    pair.expect_equal()
    assert pair.optimizer.state[pair.model.weight]["step"] == 1


def test_a_checkpoint_from_inside_a_wrapper_is_loaded_outside():
    """Wrappers' prefixes are no part of a name."""
    model, optimizer = trained()
    wrapped = nn.DataParallel(mlp(6, 8, 4))
    restored = forge.attach(wrapped, lr=1e-3)
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state[wrapped.module[0].weight]["step"] == 3
    assert model is not wrapped


def test_the_schedule_goes_on_after_a_load():
    def build():
        model = mlp(6, 8, 4)
        optimizer = forge.attach(model, lr=1e-2)
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)

    model, optimizer, schedule = build()
    for seed in range(4):
        model(batch(5, 6, seed=seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    other, restored, resumed = build()
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert restored.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]


def test_a_tied_weight_is_one_entry_and_an_untied_one_two():  # field log row 37
    """What is tied is decided by identity, whatever the model's config says."""

    class Config:
        tie_word_embeddings = True

    class Model(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.config = Config()
            self.embedding = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

        def get_input_embeddings(self):
            return self.embedding

        def get_output_embeddings(self):
            return self.head

        def forward(self, ids):
            return self.head(self.embedding(ids))

    tied = forge.attach(Model(True), lr=1e-3)
    assert list(tied.names.values()) == ["embedding.weight"]
    model = Model(False)
    with pytest.warns(UserWarning, match=r"two parameters .* trained and saved as two"):
        untied = forge.attach(model, lr=1e-3)
    model(torch.tensor([[1, 2]])).square().sum().backward()
    untied.step()
    saved = untied.state_dict()
    assert len(saved["state"]) == 2
    assert saved["param_groups"][0]["param_names"] == ["embedding.weight", "head.weight"]
    assert all(state["exp_avg"].abs().sum() > 0 for state in saved["state"].values())


def test_a_resumed_run_adds_up_its_micro_batches_in_the_same_order():
    """Two micro-batches take more than their sum, which the first becomes if the window before has shown that."""

    def window(model, optimizer, number):
        model(batch(3, 8, seed=2 * number)).square().mean().backward()
        summed = next(iter(optimizer.owned.values())).factors.accumulator is not None
        model(batch(3, 8, seed=2 * number + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return summed

    model = mlp(8, 8, bias=False)
    optimizer = forge.attach(model, lr=1e-2, accumulation_steps=None)
    assert not window(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert window(model, optimizer, 1)
    resumed = mlp(8, 8, bias=False)
    resumed.load_state_dict(saved[0])
    restored = forge.attach(resumed, lr=1e-2, accumulation_steps=None)
    restored.load_state_dict(saved[1])
    assert window(resumed, restored, 1)
    expect_bit_equal(snapshot(model, optimizer), snapshot(resumed, restored))
