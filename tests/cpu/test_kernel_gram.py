"""The gradient's norm from the tokens' Gram matrices: right to 1e-5 where it says that it is sure, fp64 by hand."""

import pytest
import torch

from forge_megatron import kernels
from forge_megatron.kernels import fused, triton_norms
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


HALF = {
    "random": lambda: [(batch(150, 48).bfloat16(), batch(150, 40, seed=1).bfloat16())],
    "correlated": lambda: [(correlated(150, 48, 0).bfloat16(), correlated(150, 40, 1).bfloat16())],
    "segments": lambda: [(batch(t, 48, seed=t).half(), batch(t, 40, seed=2 * t).half()) for t in (131, 0, 5, 140)],
    "one_token": lambda: [(batch(1, 48).bfloat16(), batch(1, 40, seed=1).bfloat16())],
    "cancelled": lambda: [
        (torch.cat([batch(16, 48), -batch(16, 48)]).bfloat16(), batch(16, 40).repeat(2, 1).bfloat16())
    ],
    "small": lambda: [((batch(9, 48) * 1e-24).bfloat16(), batch(9, 40).bfloat16())],
    "zero": lambda: [(torch.zeros(24, 48).bfloat16(), batch(24, 40).bfloat16())],
    "strided": lambda: [(batch(9, 64).bfloat16()[:, :48], batch(9, 40).bfloat16())],
    "nan": lambda: [(batch(9, 48).index_fill_(0, torch.tensor([3]), torch.nan).bfloat16(), batch(9, 40).bfloat16())],
}


@pytest.fixture(params=[True, False], ids=["gram", "formed"])
def either_way(request, monkeypatch):
    """Whether every weight takes its Gram matrices, or none."""
    monkeypatch.setattr(triton_norms, "grams_norm_us", lambda *_: 0.0 if request.param else 2.0)
    monkeypatch.setattr(triton_norms, "formed_norm_us", lambda *_: 1.0)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_many_norms_at_once(either_way, dtype, monkeypatch):
    """Weights of both dtypes, with what must be formed among them; each as fp64 by hand has it."""
    monkeypatch.setattr(triton_norms, "PROGRAMS", 3)
    factors = [case() for case in HALF.values()]
    factors.append([(batch(9, 200).bfloat16(), batch(9, 136).bfloat16())])
    # Not for these kernels: fp32, rows that are not 16 bytes apart, no token.
    factors += [[(batch(9, 48), batch(9, 40))], [(batch(9, 7).bfloat16(), batch(9, 5).bfloat16())]]
    factors.append([(torch.zeros(0, 48).bfloat16(), torch.zeros(0, 40).bfloat16())])
    outs = [torch.full((), 7.0, dtype=dtype) for _ in factors]
    shapes = [torch.Size((dy.shape[1], x.shape[1])) for [(dy, x), *_] in factors]
    kernels.wgrad_norms_sq(factors, outs, accumulators=[None] * len(outs), shapes=shapes, backend="triton")
    for name, segments, out in zip([*HALF, *range(4)], factors, outs, strict=True):
        if name == "nan":
            assert out.isnan()
        elif name == "cancelled":
            assert out.item() < 1e-9
        else:
            assert out.item() == pytest.approx(exact(segments), rel=1e-5), name


def test_an_accumulator_is_in_the_norm():
    segments = HALF["random"]()
    added = [None, batch(48, 40)]
    outs = [torch.zeros(()), torch.zeros(())]
    kernels.wgrad_norms_sq(
        [segments] * 2, outs, accumulators=added, shapes=[torch.Size((48, 40))] * 2, backend="triton"
    )
    whole = wgrad(segments, shape=(48, 40)) + added[1].double()
    assert outs[0].item() == pytest.approx(exact(segments), rel=1e-5)
    assert outs[1].item() == pytest.approx(whole.square().sum().item(), rel=1e-5)


def test_only_what_is_sure_is_taken_from_the_gram_matrices(monkeypatch):
    """The sums of what was formed are left out by a kernel that forms nothing: what is sure must not need them."""
    monkeypatch.setattr(triton_norms, "grams_norm_us", lambda *_: 0.0)
    monkeypatch.setattr(triton_norms, "formed_norm_us", lambda *_: 1.0)

    class Nothing:
        def __getitem__(self, grid):
            return lambda table, segments, weights, known, partials, **options: partials.fill_(-1.0)

    monkeypatch.setattr(triton_norms, "form_kernel", Nothing())
    names = ("random", "segments", "cancelled", "zero", "small")
    factors = [HALF[name]() for name in names]
    for segments in factors:
        out = torch.zeros((), dtype=torch.float64)
        kernels.wgrad_norms_sq([segments], [out], accumulators=[None], shapes=[torch.Size((48, 40))], backend="triton")
        if segments is factors[0] or segments is factors[1]:
            assert out.item() == pytest.approx(exact(segments), rel=1e-5)
        else:
            assert out.item() == -triton_norms.PROGRAMS
