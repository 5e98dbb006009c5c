"""The gradient's norm from the tokens' Gram matrices: right to 1e-5 where it says that it is sure, fp64 by hand."""

import pytest
import torch

from forge_megatron import kernels
from forge_megatron.kernels import fused
from forge_megatron.kernels.gram import gram_norm_sq, pays
from tests.cpu.oracles import wgrad
from tests.cpu.training import backends, batch


def correlated(tokens: int, features: int, seed: int):
    """Tokens with a large common part, as activations have."""
    return batch(tokens, features, seed=seed) + 3 * batch(1, features, seed=seed + 100)


def cancelling(left: float):
    """Pairs of equal tokens with opposite gradients; ``left`` is what remains of them."""

    def case(rows, columns):
        dy, x = batch(16, rows), batch(16, columns, seed=1)
        return [(torch.cat([dy, -dy * (1 - left)]), torch.cat([x, x]))]

    return case


CASES = {
    "one": lambda rows, columns: [(batch(1, rows), batch(1, columns, seed=1))],
    "random": lambda rows, columns: [(batch(24, rows), batch(24, columns, seed=1))],
    "correlated": lambda rows, columns: [(correlated(24, rows, 0), correlated(24, columns, 1))],
    "common_inputs": lambda rows, columns: [(batch(24, rows), correlated(24, columns, 1))],
    "segments": lambda rows, columns: [(batch(t, rows, seed=t), batch(t, columns, seed=2 * t)) for t in (9, 0, 5, 4)],
    "bf16": lambda rows, columns: [(batch(24, rows).bfloat16(), batch(24, columns, seed=1).bfloat16())],
    "mixed": lambda rows, columns: [(batch(24, rows).bfloat16(), batch(24, columns, seed=1))],
    "large": lambda rows, columns: [(batch(24, rows) * 1e12, batch(24, columns, seed=1))],
    "small": lambda rows, columns: [(batch(24, rows) * 1e-12, batch(24, columns, seed=1))],
    "one_token_of_many": lambda rows, columns: [
        (batch(24, rows) * torch.logspace(0, -20, 24)[:, None], batch(24, columns, seed=1))
    ],
    "partly_cancelled": cancelling(0.8),
}
NOT_SURE = {
    "cancelled": cancelling(1e-3),
    "all_cancelled": cancelling(0.0),
    "underflow": lambda rows, columns: [(batch(24, rows) * 1e-24, batch(24, columns, seed=1))],
    "overflow": lambda rows, columns: [(batch(24, rows) * 1e20, batch(24, columns, seed=1))],
    "zero": lambda rows, columns: [(torch.zeros(24, rows), batch(24, columns, seed=1))],
    "nan": lambda rows, columns: [(batch(24, rows).index_fill_(0, torch.tensor([3]), torch.nan), batch(24, columns))],
}


def exact(segments) -> float:
    shape = segments[0][0].shape[1], segments[0][1].shape[1]
    return wgrad(segments, shape=shape).square().sum().item()


@pytest.mark.parametrize("case", CASES)
def test_where_it_is_sure_the_square_is_right_to_its_tolerance(case):
    segments = CASES[case](320, 288)
    norm_sq, sure = gram_norm_sq(segments)
    assert sure
    assert abs(norm_sq.item() - exact(segments)) <= 1e-5 * exact(segments)


@pytest.mark.parametrize("case", NOT_SURE)
def test_where_terms_cancel_or_leave_fp32_it_says_so(case):
    assert not gram_norm_sq(NOT_SURE[case](320, 288))[1]


@backends
@pytest.mark.parametrize("case", ["random", "segments", "bf16", "cancelled", "all_cancelled"])
def test_the_norm_is_right_either_way(backend, case, monkeypatch):
    """Where the Gram matrices are not sure, the gradient is formed: decided on the device by the kernel."""
    monkeypatch.setattr(fused, "pays", lambda *_: True)
    segments = {**CASES, **NOT_SURE}[case](48, 40)
    out = torch.full((), 7.0, dtype=torch.float64)
    kernels.wgrad_norm_sq(segments, out, backend=backend)
    # What the cancelling sums leave over is rounding, of which the gradient itself has no more digits.
    left_over = (torch.finfo(torch.float32).eps * 16) ** 2 * 48 * 40 if case == "all_cancelled" else 0.0
    assert abs(out.item() - exact(segments)) <= 1e-5 * exact(segments) + left_over


def test_a_norm_that_is_not_finite_stays_so(monkeypatch):
    monkeypatch.setattr(fused, "pays", lambda *_: True)
    out = torch.zeros(())
    kernels.wgrad_norm_sq(NOT_SURE["nan"](48, 40), out, backend="reference")
    assert out.isnan()


def test_it_is_chosen_for_few_tokens_of_wide_layers():
    def of(tokens, rows, columns):
        return pays([(torch.empty(tokens, rows), torch.empty(tokens, columns))], rows, columns)

    assert of(64, 2048, 2048)
    assert not of(2048, 2048, 2048)
    assert not of(8, 16, 16)
    assert not pays([], 2048, 2048)
    ids, values = torch.zeros(64, dtype=torch.int64), torch.empty(64, 2048)
    assert not pays([(ids, values)], 2048, 2048)
