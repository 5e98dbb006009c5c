"""Liger's kernels in the bench's models: the same model, and in that instance alone (Triton's interpreter)."""

import inspect
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter

from launch.bench import __main__ as bench_main
from launch.bench import arms, liger, model, parity, report, shapes, spec
from launch.bench.arm import PARITY_BOUND

TOKENS = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(0))


class Scalar(float):
    """A kernel's number as a GPU has it, with a dtype to convert to."""

    def to(self, dtype):
        return self


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The interpreter gives a kernel Python's numbers, and has no libdevice."""
    monkeypatch.setattr(rms_norm, "rsqrt", rsqrt)
    convert = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda x: Scalar(x) if isinstance(x, float) else convert(x))


def losses_and_gradients(built, loss):
    loss(built).backward()
    return loss(built).detach(), [p.grad for p in built.parameters()]


def plain_loss(built):
    return built(input_ids=TOKENS, labels=TOKENS).loss


@pytest.mark.parametrize("kind", ["tiny-llama", "tiny-qwen3"])
def test_it_is_the_same_model(kind):
    shape = shapes.get(kind)
    plain = model.build(shape, "cpu")
    with_it = model.build(replace(shape, liger=True), "cpu")
    beside = model.build(shape, "cpu")
    want, gradients = losses_and_gradients(plain, plain_loss)
    for loss in (plain_loss, lambda built: liger.causal_lm_loss(built, TOKENS)):
        with_it.zero_grad()
        got, found = losses_and_gradients(with_it, loss)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        for g, w in zip(found, gradients, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)
    said = str(with_it)
    assert "LigerRMSNorm" in said
    assert "LigerSwiGLUMLP" in said
    # Neither what was made before nor what is made after has them, and each layer rotates by Liger's kernel.
    assert "Liger" not in str(beside) + str(model.build(shape, "cpu"))
    rotate = "liger_rotary_pos_emb"
    rotations = [inspect.unwrap(one.model.layers[0].self_attn.forward).__globals__ for one in (with_it, beside)]
    assert [names["apply_rotary_pos_emb"].__name__ == rotate for names in rotations] == [True, False]


@pytest.mark.parametrize("name", ["forge-head", "adamw-fused-liger-loss"])
def test_the_check_before_the_times_is_made_with_it(monkeypatch, name):
    monkeypatch.setattr(parity, "STEPS", 2)
    monkeypatch.setattr(parity, "SEQUENCE", 4)
    built = []
    monkeypatch.setattr(liger, "apply", lambda one, apply=liger.apply: (built.append(one), apply(one)))
    assert parity.parity(name, "qwen3", "cpu", liger=True)["distance"] < PARITY_BOUND
    assert len(built) == 2
    assert not arms.get(name).captured


def test_cells_with_it_are_places_of_their_own_and_what_has_no_kernels_is_refused():
    bench = spec.load("liger", ["liger=[false,true]", "arms=[forge]", "sequence=[512]"])
    plain, with_it = spec.cells(bench)
    assert (plain.place, with_it.place) == ("llama-3.1-8b/b1/s512", "llama-3.1-8b/b1/s512/liger")
    assert plain.through != with_it.through
    assert bench_main.refuse(bench, rehearse=True).startswith("liger: its kernels do not run on a CPU; rehearse with")
    other = spec.load("liger", ["shapes=[gpt2]"])
    assert bench_main.refuse(other, rehearse=True).startswith("liger: gpt2 has no kernels of Liger's here")
    with pytest.raises(ValueError, match="kernels for kind='gpt2' are not built in; use one of: llama, qwen3"):
        liger.apply(model.build(replace(shapes.get("gpt2"), num_hidden_layers=1), "meta"))
    made = {"cell": vars(with_it), "out_of_memory": "x"}
    assert report.line(made).startswith("llama-3.1-8b/b1/s512/liger/forge")
