"""int8 and fp8 states: what the codes hold, in every backend, through steps and checkpoints."""

import pytest
import torch
from code_cases import CODES, every_code, raw
from torch import nn

import forge_megatron as forge
from forge_megatron.formats import resolve_recipe, state_format, state_format_of
from forge_megatron.kernels import Slot, step, wgrad_step
from forge_megatron.rules import get
from tests.cpu.training import backends, batch, bits_of, expect_bit_equal, mean_square, mlp

codes = pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
formats = pytest.mark.parametrize("name", ["int8", "fp8"])
INSIDE = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@codes
def test_every_code_survives_decoding_and_encoding(code):  # field log row 99
    """Whatever the scale; and the decoded codes ascend, are symmetric, and contain one zero and the largest."""
    stored = every_code(code)
    for largest in [m * 2.0**e for e in range(-52, 120, 9) for m in (1.0, 1.37, 1.999)]:
        scale = code.scale(torch.tensor([largest])).expand(stored.shape)
        values = code.decode(stored, scale)
        assert torch.equal(raw(code.encode(values, scale)), raw(stored))
        assert (values.diff() > 0).all()
        assert (values == 0).sum() == 1
        assert values[-1] >= largest * (1 - 2.0**-4)
        if values[0] < 0:
            assert torch.equal(values, -values.flip(0))


def slot(shape, name: str, rule: str = "adamw", weight=torch.bfloat16, store: str = "nearest", seed: int = 0) -> Slot:
    """A weight of which some updates have been made."""
    generator = torch.Generator().manual_seed(seed)
    rule = get(rule)
    fmt = state_format(name)
    stored = []
    for state in rule.states:
        x = torch.randn(shape, generator=generator)
        code = fmt.code(nonnegative=state in rule.nonnegative)
        stored.append(code.store(x.square() if state in rule.nonnegative else x))
    w = torch.randn(shape, generator=generator)
    return Slot(
        rule,
        w.to(weight),
        tuple(state.view(shape) for state, _ in stored),
        torch.tensor(rule.scalars(rule.resolve({"lr": 0.125}), 3)),
        master=w if store == "master" else None,
        scales=tuple(scale for _, scale in stored),
    )


def written(slot: Slot) -> dict[str, torch.Tensor]:
    tensors = dict(slot.tensors())
    return {**tensors, **{f"scale {index}": scale for index, scale in enumerate(slot.scales)}}


def decoded(slot: Slot) -> dict[str, torch.Tensor]:
    loads = zip(slot.rule.states, slot.codes(), slot.states, slot.scales, strict=True)
    return {name: code.load(state, scale).view(state.shape) for name, code, state, scale in loads}


SHAPES = [(3, 64), (5, 130), (33, 100), (7,), (), (2, 3, 70), (130, 1), (4, 200)]


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("store", ["nearest", "master"])
def test_a_step_equals_the_rule_on_the_decoded_states(name, shape, store):
    """Any row length and any number of dimensions, in both backends; the rule is computed in fp64."""
    for backend in ("reference", "triton"):
        ours = slot(shape, name, store=store)
        before = decoded(ours)
        w = (ours.weight if ours.master is None else ours.master).double()
        g = torch.randn(shape, generator=torch.Generator().manual_seed(9))
        step([ours], [g], backend=backend)
        m = 0.9 * before["exp_avg"].double() + 0.1 * g.double()
        v = 0.999 * before["exp_avg_sq"].double() + 0.001 * g.double() ** 2
        w = w * (1 - 0.125e-2) - 0.125 * (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
        stepped = ours.weight if ours.master is None else ours.master
        eps = 2.0**-8 if ours.master is None else 2.0**-20
        torch.testing.assert_close(stepped.double(), w, rtol=eps, atol=1e-6)
        after = decoded(ours)
        for state, exact in (("exp_avg", m), ("exp_avg_sq", v)):
            index = ours.rule.states.index(state)
            expected, _ = ours.codes()[index].store(exact.float())
            # Where fp32 rounds to the other side of a tie, the neighbouring code.
            assert (raw(ours.states[index]) == raw(expected.view(shape))).float().mean() > 0.98
            torch.testing.assert_close(after[state].double(), exact, rtol=0.07, atol=float(exact.abs().max()) * 2e-2)


@formats
@pytest.mark.parametrize("shape", [(33, 100), (64, 128), (70, 48), (130, 200)], ids=str)
def test_both_backends_and_both_ways_to_step_store_the_same(name, shape):
    """Operands of whole numbers: their products are exact in any order."""
    generator = torch.Generator().manual_seed(1)
    dy, x = (torch.randint(-3, 4, (9, n), generator=generator).float() for n in shape)
    results = []
    for backend in ("reference", "triton"):
        fused = slot(shape, name, "lion", torch.float32)
        wgrad_step(fused, [(dy, x)], backend=backend)
        given = slot(shape, name, "lion", torch.float32)
        step([given], [dy.t() @ x], backend=backend)
        results += [written(fused), written(given)]
    for other in results[1:]:
        for key, value in results[0].items():
            same = (raw(value) == raw(other[key])).float().mean() if value.element_size() == 1 else None
            # The order of a lerp's two roundings is the languages' own.
            assert same is None or same > 0.999, key
            if same is None:
                torch.testing.assert_close(value, other[key], rtol=1e-6, atol=1e-6)


@backends
@formats
@INSIDE
def test_a_block_with_a_gradient_that_is_not_finite_keeps_every_bit(backend, name):
    for fused in (False, True):
        ours, untouched, finite = (slot((6, 150), name) for _ in range(3))
        dy, x = torch.zeros(1, 6), torch.ones(1, 150)
        dy[0, 2] = 1.0
        g = dy.t() @ x
        if fused:
            wgrad_step(finite, [(dy.clone(), x.clone())], backend=backend)
            x[0, 70] = torch.inf
            dy[0, [0, 1, 3, 4, 5]] = 1.0
            wgrad_step(ours, [(dy, x)], backend=backend)
            rows = range(6)
        else:
            step([finite], [g.clone()], backend=backend)
            g[2, 70] = torch.nan
            step([ours], [g], backend=backend)
            rows = [2]
        for key, value in written(ours).items():
            old, new = written(untouched)[key], written(finite)[key]
            bits = (lambda t: t.view(torch.uint8)) if value.element_size() == 1 else (lambda t: t)
            block = slice(1, 2) if key.startswith("scale") else slice(64, 128)
            for row in rows:
                assert torch.equal(bits(value)[row, block], bits(old)[row, block]), key
            # A scale of fp8 is a power of two, and seldom another.
            moved = not torch.equal(bits(value)[2, : block.start], bits(old)[2, : block.start])
            assert moved or key.startswith("scale"), key
            if not fused:
                assert torch.equal(bits(value)[3:], bits(new)[3:])


@backends
@formats
def test_a_coordinate_without_gradients_stays_exactly_zero(backend, name):
    torch.manual_seed(0)
    layer = nn.Linear(70, 4, bias=False)
    optimizer = forge.attach(layer, lr=1e-2, state_format=name, weight_decay=0.0, backend=backend)
    before = layer.weight.detach().clone()
    x = batch(8, 70)
    x[:, 3] = 0
    for _ in range(4):
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[layer.weight]
    assert torch.equal(layer.weight[:, 3], before[:, 3])
    assert not raw(state["exp_avg"])[:, 3].any()
    assert not raw(state["exp_avg_sq"])[:, 3].any()
    others = torch.arange(70) != 3
    assert (raw(state["exp_avg_sq"])[:, others] > 0).all()
    assert (layer.weight[:, others] != before[:, others]).all()


@backends
@formats
def test_a_block_of_zeros_before_any_gradient_has_no_scale_and_then_its_own(backend, name):  # field log row 101
    layer = nn.Linear(256, 4, bias=False)
    optimizer = forge.attach(layer, lr=1e-2, state_format=name, weight_decay=0.0, backend=backend)
    before = layer.weight.detach().clone()
    for first in (256, 64, 0):
        x = batch(8, 256)
        x[:, :first] = 0
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[layer.weight]
        assert torch.equal(layer.weight[:, :first], before[:, :first])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{key}_scale"][:, 0] == 0, torch.full((4,), first > 0))
            assert not raw(state[key])[:, :first].any()
        assert layer.weight.isfinite().all()
    assert (layer.weight != before).all()


#: Those that have states of the weight's shape, of every regime.
RULES = ["adamw", "adam", "adagrad", "rmsprop", "adamax", "nadam", "radam", "lion", "momentum"]
RULES += ["lamb", "muon", "scion", "adam_mini", "lars"]


@formats
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_close_to_its_fp32_states(name, rule):
    """Twenty steps: the distance from fp32 states is a small part of the way."""
    ways = []
    options = {"adagrad": {"initial_accumulator_value": 0.1}, "muon": {"adamw": {"lr": 1e-3}}}.get(rule, {})
    options = {"adamw": {"lr": 1e-3}} if rule == "scion" else options
    for fmt in ("fp32", name):
        model = mlp(70, 40, 8)
        start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        optimizer = forge.attach(model, rule, lr=1e-3, state_format=fmt, **options)
        for at in range(20):
            mean_square(batch(16, 70, seed=at))(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        ways.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - start)
    distance = ((ways[1] - ways[0]).norm() / ways[0].norm()).item()
    # A sign, and the small singular values that Newton-Schulz raises, make more of a code's rounding.
    assert 0 < distance < {"int8": 0.05, "fp8": 0.12}[name] * (3 if rule in ("lion", "muon", "scion") else 1)


@pytest.mark.parametrize("rule", ["adafactor", "adalomo", "sm3", "galore", "apollo", "apollo_mini"])
def test_a_rule_without_states_of_the_weights_shape_refuses_8_bits_by_name(rule):
    with pytest.raises(NotImplementedError, match=rf"0\.weight: {rule} keeps .* always fp32, and state_format='int8'"):
        forge.attach(mlp(6, 8, 4), rule, lr=1e-3, recipe="int8")


def test_a_difference_of_states_is_refused():
    with pytest.raises(ValueError, match=r"0\.weight: rmsprop subtracts the square of grad_avg.*state_format='int8'"):
        forge.attach(mlp(6, 8, 4), "rmsprop", lr=1e-3, centered=True, state_format="int8")


@pytest.mark.parametrize(("name", "below", "zero"), [("bf16", 0.0, 0.0), ("int8", 0.45, 0.0), ("fp8", 0.0, 0.9)])
def test_why_a_difference_of_states_is_refused(name, below, zero):
    """Of gradients that vary by a tenth of their mean: a variance below 0, or one that leaves eps alone below them."""
    mean = torch.randn(64, 640, generator=torch.Generator().manual_seed(0))
    kept = {True: mean.square() * 1.01, False: mean}
    fmt = state_format(name)
    square, mean = (fmt.code(nonnegative=sign).load(*fmt.code(nonnegative=sign).store(kept[sign])) for sign in kept)
    variance = square - mean.square()
    for found, share in ((variance < 0, below), (variance == 0, zero)):
        assert share <= found.float().mean() <= share + 0.06


def trained(name, steps: int, backend: str, **options):
    model = mlp(12, 20, 8).bfloat16()
    optimizer = forge.attach(model, lr=1e-3, recipe=name, backend=backend, **options)
    return run(model, optimizer, range(steps))


def run(model, optimizer, steps):
    for at in steps:
        mean_square(batch(6, 12, seed=at).bfloat16())(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@backends
@formats
def test_a_checkpoint_keeps_codes_and_scales(backend, name):  # field log row 104
    straight = trained(name, 4, backend)
    halfway, saved = trained(name, 2, backend, waiting=True)
    weights, state = halfway.state_dict(), saved.state_dict()
    resumed, optimizer = trained(name, 0, backend)
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    entry = optimizer.state[resumed[0].weight]
    assert [entry[key].dtype for key in ("exp_avg", "exp_avg_sq")] == [
        state_format(name).signed.dtype,
        state_format(name).nonnegative.dtype,
    ]
    assert entry["exp_avg_scale"].shape == (20, 1)
    expect_bit_equal(bits_of(*straight), bits_of(*run(resumed, optimizer, range(2, 4))))


def test_scales_of_an_earlier_version_are_refused():
    _, saved = trained("int8", 2, "reference")
    model, optimizer = trained("int8", 1, "reference")
    state_dict = saved.state_dict()
    entry = state_dict["state"][0]
    state_dict["state"][0] = {**entry, "exp_avg_scale": entry["exp_avg_scale"].float()}
    before = bits_of(model, optimizer)
    for convert in (False, True):
        with pytest.raises(ValueError, match=r"0\.weight: exp_avg_scale is torch\.float32 .* of an earlier version"):
            optimizer.load_state_dict(state_dict, convert=convert)
    expect_bit_equal(before, bits_of(model, optimizer))


@formats
def test_another_format_is_loaded_on_request_and_told(name):
    fmt = state_format(name)
    model, source = trained("fp32-state", 2, "reference")
    target_model, target = trained(name, 0, "reference")
    with pytest.raises(ValueError, match=r"0\.weight: exp_avg is torch\.float32 in the checkpoint"):
        target.load_state_dict(source.state_dict())
    with pytest.warns(UserWarning, match=f"converted from float32 to {name}"):
        target.load_state_dict(source.state_dict(), convert=True)
    p, q = model[0].weight, target_model[0].weight
    expected, scale = fmt.nonnegative.store(source.state[p]["exp_avg_sq"])
    assert torch.equal(raw(target.state[q]["exp_avg_sq"]), raw(expected))
    assert torch.equal(target.state[q]["exp_avg_sq_scale"], scale)
    back_model, back = trained("fp32-state", 0, "reference")
    with pytest.warns(UserWarning, match="to fp32"):
        back.load_state_dict(target.state_dict(), convert=True)
    assert torch.equal(back.state[back_model[0].weight]["exp_avg_sq"], fmt.nonnegative.load(expected, scale))


@pytest.mark.parametrize("source", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("target", ["fp32", "bf16", "int8", "fp8"])
def test_every_format_is_converted_to_every_other(source, target):
    model, saved = trained(None, 2, "reference", state_format=source)
    other, loaded = trained(None, 0, "reference", state_format=target)
    if source == target:
        loaded.load_state_dict(saved.state_dict())
    else:
        before = bits_of(other, loaded)
        with pytest.raises(ValueError, match=r"0\.weight: exp_avg is .* load with convert=True"):
            loaded.load_state_dict(saved.state_dict())
        expect_bit_equal(before, bits_of(other, loaded))
        with pytest.warns(UserWarning, match=rf"converted from \w+ to {target}"):
            loaded.load_state_dict(saved.state_dict(), convert=True)
    theirs, ours = saved.state[model[0].weight], loaded.state[other[0].weight]
    for name in ("exp_avg", "exp_avg_sq"):
        sign = name == "exp_avg_sq"
        value = state_format(source).code(nonnegative=sign).load(theirs[name], theirs.get(f"{name}_scale"))
        codes, scale = state_format(target).code(nonnegative=sign).store(value)
        assert torch.equal(raw(ours[name]), raw(codes))
        assert scale is None or torch.equal(ours[f"{name}_scale"], scale)
    assert ours["step"] == theirs["step"] == 2


def test_a_master_is_dropped_or_made_on_request_alone():
    model, saved = trained(None, 2, "reference", state_format="int8", weight_store="master")
    other, loaded = trained("int8", 0, "reference")
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has an fp32 master"):
        loaded.load_state_dict(saved.state_dict())
    with pytest.warns(UserWarning, match="from fp32 masters to weights alone"):
        loaded.load_state_dict(saved.state_dict(), convert=True)
    other.load_state_dict(model.state_dict())
    third, back = trained(None, 0, "reference", state_format="int8", weight_store="master")
    third.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has no 'master'.*convert=True"):
        back.load_state_dict(loaded.state_dict())
    with pytest.warns(UserWarning, match="from weights alone to fp32 masters"):
        back.load_state_dict(loaded.state_dict(), convert=True)
    assert torch.equal(back.state[third[0].weight]["master"], model[0].weight.float())


def test_bytes_and_the_recipes_formats():
    for recipe, name in (("int8", "int8"), ("fp8", "fp8")):
        model = mlp(100, 64, 4).bfloat16()
        optimizer = forge.attach(model, lr=1e-3, recipe=recipe)
        rows = {row.name: row for row in optimizer.coverage}
        assert rows["0.weight"].state_bytes == 2 * (64 * 100 + 2 * 64 * 2)
        assert rows["2.bias"].state_bytes == 2 * (4 + 2)
        assert state_format_of(optimizer.state[model[0].weight]["exp_avg_sq"]).name == name
        assert resolve_recipe(torch.bfloat16, recipe)[1].name == "nearest"


def test_one_group_keeps_fp32_states():
    """Field row 95."""
    model = nn.Sequential(nn.Embedding(10, 70), nn.Linear(70, 4)).bfloat16()
    groups = [{"params": [model[0].weight], "state_format": "fp32"}, {"params": list(model[1].parameters())}]
    optimizer = forge.attach(model, params=groups, lr=1e-3, recipe="int8")
    model(torch.arange(10)).float().square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.float32
    assert optimizer.state[model[1].weight]["exp_avg"].dtype is torch.int8
    assert optimizer.state[model[1].weight]["exp_avg_sq"].dtype is torch.uint8


@backends
@formats
@INSIDE
def test_a_skipped_step_changes_no_bit(backend, name):
    """Decided on the device: a multiplier of NaN reaches every block."""
    model, optimizer = trained(name, 2, backend, skip="atomic")
    before = bits_of(model, optimizer)
    x = batch(6, 12, seed=9).bfloat16()
    x[0, 0] = torch.inf
    mean_square(x)(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()  # reads the flag, and with it takes the step counts back
    expect_bit_equal(before, bits_of(model, optimizer))
