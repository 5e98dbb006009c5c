"""State formats, weight stores and the recipes that name pairs of them."""

import pytest
import torch

from forge_megatron.formats import resolve_group, resolve_recipe, state_format, state_format_of, weight_store

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "recipe", "state", "store"),
    [
        (torch.float32, None, torch.float32, "nearest"),
        (torch.bfloat16, None, torch.bfloat16, "nearest"),
        (torch.float16, None, torch.float32, "nearest"),
        *((dtype, "fp32-state", torch.float32, "nearest") for dtype in DTYPES),
        *((dtype, "bf16-state", torch.bfloat16, "nearest") for dtype in DTYPES),
        *((dtype, "fp32-master", torch.float32, "master") for dtype in DTYPES),
        *((dtype, "int8", torch.int8, "nearest") for dtype in DTYPES),
        *((dtype, "fp8", torch.float8_e4m3fn, "nearest") for dtype in DTYPES),
        *((dtype, "sr-store", torch.bfloat16, "stochastic") for dtype in (torch.float32, torch.bfloat16)),
        *((dtype, "fp8-weight", torch.bfloat16, "fp8") for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_a_recipe_is_a_state_format_and_a_weight_store(dtype, recipe, state, store):
    fmt, got = resolve_recipe(dtype, recipe)
    assert (fmt.signed.dtype, got.name) == (state, store)


def test_the_parts_can_be_named_instead():
    fmt, store = resolve_recipe(torch.bfloat16, state_format="fp32", weight_store="master")
    assert (fmt.name, store.name) == ("fp32", "master")


def test_stochastic_rounding_is_to_bf16():
    with pytest.raises(TypeError, match=r"'stochastic' rounds to bfloat16, not to float16"):
        resolve_recipe(torch.float16, "sr-store")


def test_a_group_replaces_the_formats_or_a_part_of_them():
    def named(group, **defaults):
        return tuple(f.name for f in resolve_group(torch.bfloat16, group, defaults))

    assert named({}, recipe="sr-store") == ("bf16", "stochastic")
    assert named({"recipe": "fp32-master"}, recipe="sr-store") == ("fp32", "master")
    assert named({"state_format": "fp32"}, recipe="sr-store") == ("fp32", "stochastic")
    assert named({"weight_store": "nearest"}, recipe="sr-store") == ("bf16", "nearest")
    assert named({"state_format": "fp32"}) == ("fp32", "nearest")
    with pytest.raises(ValueError, match="recipe='fp32-state' already names"):
        named({"recipe": "fp32-state", "weight_store": "master"})


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match=r"recipe='fp32'.*fp32-state, bf16-state, fp32-master"):
        resolve_recipe(torch.float32, "fp32")
    with pytest.raises(ValueError, match=r"state_format='fp16'.*fp32, bf16"):
        state_format("fp16")
    with pytest.raises(ValueError, match=r"weight_store='copy'.*nearest, stochastic, master"):
        weight_store("copy")


def test_a_recipe_beside_one_of_its_parts_is_refused():
    with pytest.raises(ValueError, match=r"recipe='fp32-state' already names.*state_format='bf16'"):
        resolve_recipe(torch.float32, "fp32-state", state_format="bf16")


def test_a_dtype_that_no_weight_has_is_refused():
    with pytest.raises(TypeError, match=r"torch\.float64"):
        resolve_recipe(torch.float64)


def test_bf16_rounds_to_nearest_even():
    code = state_format("bf16").signed
    ulp = 2.0**-7
    exact = torch.tensor([1 + ulp / 2, 1 + ulp * 3 / 2, 1 + ulp * 0.51, -(1 + ulp / 2)])
    assert code.store(exact)[0].tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_is_stored_survives_decoding_and_encoding(name):
    fmt = state_format(name)
    for code in (fmt.signed, fmt.nonnegative):
        stored = torch.randn(1000).to(code.dtype)
        decoded = code.load(stored, None)
        assert decoded.dtype is torch.float32
        assert torch.equal(code.store(decoded)[0], stored)
        assert state_format_of(stored) is fmt


def test_a_state_of_no_format_is_refused():
    with pytest.raises(TypeError, match=r"torch\.int16.*torch\.float32, torch\.bfloat16, torch\.int8"):
        state_format_of(torch.zeros(1, dtype=torch.int16))


def test_states_are_zero_and_lie_as_their_weight():
    weight = torch.nn.Parameter(torch.randn(4, 6).t())
    (state,) = state_format("bf16").allocate("exp_avg", weight).values()
    assert state.stride() == weight.stride()
    assert state.dtype is torch.bfloat16
    assert not state.requires_grad
    assert not state.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_master_is_the_weight_in_fp32(dtype):
    weight = torch.nn.Parameter(torch.randn(4, 6).to(dtype))
    master = weight_store("master").allocate(weight)
    assert master.dtype is torch.float32
    assert torch.equal(master.to(dtype), weight)
    assert not master.requires_grad
    assert weight_store("nearest").allocate(weight) is None


def test_an_fp32_weight_is_its_own_master():
    assert weight_store("master").allocate(torch.randn(4, 6)) is None


def test_bf16_states_keep_every_number_that_they_can_hold():
    code = state_format("bf16").signed
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    again, _ = code.store(code.load(every, None))
    assert torch.equal(again.view(torch.int16)[~every.isnan()], every.view(torch.int16)[~every.isnan()])
