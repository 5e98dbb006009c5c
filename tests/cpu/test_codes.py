"""The int8 and fp8 codes themselves: their levels, and that every backend has the same."""

import code_cases
import pytest
import torch
from code_cases import CODES, raw

from forge_megatron.formats import state_format
from forge_megatron.formats.code import scale_shape

codes = pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
formats = pytest.mark.parametrize("name", ["int8", "fp8"])


@pytest.mark.parametrize(("name", "root", "top"), [("int8-signed", 2, 127), ("int8-nonnegative", 4, 255)])
def test_a_level_is_the_nearest_root(name, root, top):
    """Between levels as at their limits, half a level from either; the largest of a block is the top level."""
    code = CODES[name]
    limits = (torch.arange(top, dtype=torch.float64) + 0.5) ** root
    between = torch.rand(1 << 12, generator=torch.Generator().manual_seed(0)).double() * top**root
    between = between[((between[:, None] / limits - 1).abs() > 1e-6).all(1)]
    # fp32 rounds a value, its scale's inverse and their product: by 2e-7 of a value together.
    x = torch.cat([between, limits * (1 - 1e-6), limits * (1 + 1e-6)])
    for largest in (1.37e-9, 1.0, 2.9e4):
        scale = code.scale(torch.tensor(largest))
        assert abs(scale.item() * top**root / largest - 1) <= 2.0**-8
        stored = raw(code.encode((x * scale.item()).float(), scale.expand(x.shape))).double()
        assert torch.equal(stored, (x.float().double() ** (1 / root)).round().clamp(min=root == 4))
        assert raw(code.encode(torch.tensor([largest]), scale.expand(1))).item() == top
    # A value at a limit, exactly, has the level above it.
    assert torch.equal(raw(code.encode(limits[:5].float(), torch.ones(5))), torch.arange(1, 6).to(torch.uint8))


@codes
def test_the_interpreted_kernels_have_the_same_codes(code):
    code_cases.assert_kernels_agree(code, "cpu")


@formats
def test_zero_is_code_zero_and_a_second_moment_never_becomes_it(name):
    code = state_format(name).nonnegative
    v = torch.tensor([1.0, 0.0, *(10.0**-e for e in range(1, 38)), 1e-44])
    stored, scale = code.store(v)
    assert torch.equal(raw(stored) == 0, v == 0)
    assert code.load(stored, scale)[1] == 0
    stored, scale = code.store(torch.zeros(70))
    assert not raw(stored).any()
    assert not scale.any()
    assert not code.load(stored, scale).any()


@codes
@pytest.mark.parametrize("shape", [(), (0,), (65,), (2, 0), (2, 3, 70)])
def test_codes_and_what_they_stand_for_have_the_states_shape(code, shape):
    stored, scale = code.store(torch.ones(shape))
    assert stored.shape == code.load(stored, scale).shape == shape
    assert scale.shape == scale_shape(torch.Size(shape))


def test_fp8_holds_what_is_small_until_its_least_scale():
    """A block of no more than 2^-54 of e4m3's largest: everything that e4m3 has in that scale."""
    code = state_format("fp8").signed
    x = torch.tensor([448.0, 1.0, 2.0**-6, 2.0**-9, -240.0]) * 2.0**-54
    stored, scale = code.store(x)
    assert torch.equal(code.load(stored, scale), x)


@formats
def test_small_coordinates_beside_an_outlier_keep_their_step(name):
    """Field row 102: a second moment of 1 among others of 1e-6, and first moments of 1e-3."""
    fmt = state_format(name)
    m, v = torch.full((256,), 1e-3), torch.full((256,), 1e-6)
    m[0] = v[0] = 1.0
    m, v = (code.load(*code.store(x)) for code, x in ((fmt.signed, m), (fmt.nonnegative, v)))
    assert (m[1:] / v[1:].sqrt() - 1).abs().max() < 0.1
