"""What the kernels refuse, by name and before anything has changed, and which backend answers to which request."""

import dataclasses

import kernel_cases
import pytest
import torch
from kernel_cases import BACKENDS, BF16, DEVICE, FP16, FP32, Case

from forge_megatron.kernels import resolve_backend, wgrad_step


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def refused(error, match, call):
    """``call(slot, segments)`` raises and leaves every byte of the slot."""
    built = kernel_cases.build(Case((33, 48), (17,), BF16, FP32, True))
    slot, segments, _, _ = kernel_cases.move(DEVICE, *built)
    with pytest.raises(error, match=match):
        call(slot, segments)
    for (_, a), (_, b) in zip(slot.tensors(), built[0].tensors(), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize(
    ("match", "segment"),
    [
        (r"layers\.0\.weight: dY and X make \[32, 48\], expected \[33, 48\]", ((5, 32), (5, 48))),
        (r"layers\.0\.weight: dY is \[5, 33\].* and X is \[6, 48\]", ((5, 33), (6, 48))),
        (r"layers\.0\.weight: dY is \[1, 5, 33\]", ((1, 5, 33), (1, 5, 48))),
    ],
)
def test_operands_that_do_not_fit_are_named(backend, match, segment):
    dy, x = (torch.zeros(shape, dtype=BF16, device=DEVICE) for shape in segment)
    refused(ValueError, match, lambda slot, segments: wgrad_step(slot, [*segments, (dy, x)], backend=backend))


def test_slots_that_do_not_fit_are_named(backend):
    def with_(**changes):
        return lambda slot, segments: wgrad_step(dataclasses.replace(slot, **changes), segments, backend=backend)

    def tensor(*shape, dtype=FP32):
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    refused(ValueError, r"exp_avg_sq is \[33, 47\]", with_(states=(tensor(33, 48), tensor(33, 47))))
    refused(ValueError, "got 1 tensors", with_(states=(tensor(33, 48),)))
    refused(TypeError, "the master is torch.bfloat16", with_(master=tensor(33, 48, dtype=BF16)))
    refused(ValueError, r"scalars is \[7\]", with_(scalars=tensor(7)))
    refused(ValueError, r"norm_sq is \[1\]", with_(norm_sq=tensor(1)))
    refused(TypeError, "state of dtype torch.float16", with_(states=(tensor(33, 48, dtype=FP16),) * 2))
    refused(TypeError, "float64 cannot be stepped", with_(weight=tensor(33, 48, dtype=torch.float64)))


def test_multipliers_and_accumulators_that_do_not_fit_are_named(backend):
    def call(**operands):
        return lambda slot, segments: wgrad_step(slot, segments, backend=backend, **operands)

    on = {"device": DEVICE}
    refused(ValueError, r"multiplier is \[1\]", call(multiplier=torch.ones(1, **on)))
    refused(ValueError, "multiplier is .* float64", call(multiplier=torch.ones((), dtype=torch.float64, **on)))
    refused(ValueError, r"the accumulator is \[48, 33\]", call(accumulator=torch.zeros(48, 33, **on)))
    refused(TypeError, "the accumulator is torch.float16", call(accumulator=torch.zeros(33, 48, dtype=FP16, **on)))


def test_backends_are_resolved_by_device_and_request(monkeypatch):
    assert resolve_backend("cpu") == "reference"
    assert resolve_backend("cuda") == "triton"
    assert resolve_backend("cuda", "reference") == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("cpu", "triton") == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r'backend="triton" cannot run on cpu.*TRITON_INTERPRET=1'):
        resolve_backend("cpu", "triton")
    for name in ("hopper", "cublas"):
        with pytest.raises(ValueError, match=f"backend='{name}' cannot run on cpu"):
            resolve_backend("cpu", name)
    with pytest.raises(ValueError, match="backend='cuda' is unknown; use one of: auto, hopper, cublas, triton, ref"):
        resolve_backend("cuda", "cuda")


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match='needs the package "triton"'):
        resolve_backend("cuda")
