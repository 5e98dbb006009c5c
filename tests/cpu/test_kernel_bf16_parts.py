"""Products of fp32 factors from bf16 parts: as exact as fp32's own."""

import pytest
import torch

from forge_megatron.kernels import fused, projected
from forge_megatron.kernels.bf16_parts import in_bf16
from tests.cpu.test_kernel_regimes import copies, expect_near, factors, make, tensors


@pytest.mark.parametrize("spread", [0, 12])
def test_a_product_of_parts_is_that_of_the_factors(spread):
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(9, n, generator=generator) * 2.0 ** (spread * torch.randn(9, n, generator=generator))
        for n in (33, 20)
    )
    of_left, of_right = in_bf16(left, right)
    assert of_left.dtype is of_right.dtype is torch.bfloat16
    exact = left.double().t() @ right.double()
    off = (of_left.double().t() @ of_right.double() - exact).abs()
    assert (off <= 2.0**-25 * (left.double().abs().t() @ right.double().abs())).all()
    # Without the smallest three it would be bf16's square, not fp32.
    coarse = of_left[27:].double().t() @ of_right[27:].double()
    assert (coarse - exact).abs().max() > 16 * off.max()


@pytest.mark.parametrize("shape", [(18, 13), (13, 18)])
def test_a_direction_is_projected_back_by_them_as_in_fp32(monkeypatch, shape):
    """As on a GPU, where the kernels of 16-bit factors take them."""
    slot, twin = make("galore", shape, taken=3), make("galore", shape, taken=3)
    before, run, launched = copies(slot), fused.wgrad_step, []
    projected.wgrad_step(twin, [factors(shape, 7)], None, None, "reference")
    monkeypatch.setattr(projected, "multiplies_in_bf16", lambda device: True)
    monkeypatch.setattr(
        fused, "wgrad_step", lambda slot, segments, *rest: launched.extend(segments) or run(slot, segments, *rest)
    )
    projected.wgrad_step(slot, [factors(shape, 7)], None, None, "reference")
    assert [dy.dtype for dy, _ in launched] == [torch.bfloat16]
    expect_near(slot, twin)
    assert not torch.equal(tensors(slot)[0], before[0])
