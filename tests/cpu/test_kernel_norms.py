"""Norms whose partial sums are added up once a window."""

import pytest
import torch

from forge_megatron.kernels import settle


def test_late_sums_are_the_sums():
    torch.manual_seed(0)
    partials = [torch.rand(size) * 10.0**index for index, size in enumerate((1, 7, 4096, 100_003))]
    norms = torch.full((len(partials),), torch.nan)
    late = list(zip(norms.unbind(), partials, strict=True))
    settle(late)
    assert late == []
    for norm, partial in zip(norms, partials, strict=True):
        assert norm.item() == pytest.approx(partial.double().sum().item(), rel=1e-6)


def test_what_is_not_finite_stays_so():
    norms = torch.zeros(2)
    settle(list(zip(norms.unbind(), (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan])), strict=True)))
    assert norms[0] == torch.inf
    assert norms[1].isnan()
    settle([])
